"""Check that a tag may be released: every file that states the version states that of the tag.

`make release-tag` runs it on GITHUB_REF_NAME, or on `v` and the package's version where that is not set.
"""

import os
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def problems(tag: str, root: Path = ROOT) -> list[str]:
    """Return the reasons why the files under `root` cannot be released as `tag`, one sentence each."""
    stated = stated_versions(root)
    found = [f"{name} says {version}, and the tag is {tag}" for name, version in stated.items() if f"v{version}" != tag]
    heading = re.compile(rf"^## \[{re.escape(tag.removeprefix('v'))}\] - \d{{4}}-\d\d-\d\d$", re.M)
    if not heading.search((root / "CHANGELOG.md").read_text(encoding="utf-8")):
        found.append(f"CHANGELOG.md has no section '## [{tag.removeprefix('v')}] - YYYY-MM-DD'")
    return found


def stated_versions(root: Path = ROOT) -> dict[str, str]:
    """Return the version that each file states, by name of the file."""
    package = (root / "covey" / "__init__.py").read_text(encoding="utf-8")
    citation = (root / "CITATION.cff").read_text(encoding="utf-8")
    return {
        "pyproject.toml": tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"],
        "covey/__init__.py": _only(r'^__version__ = "(.*)"$', package),
        "CITATION.cff": _only(r"^version: (.*)$", citation),
    }


def _only(pattern: str, text: str) -> str:
    (found,) = re.findall(pattern, text, re.M)
    return str(found)


if __name__ == "__main__":
    tag = os.environ.get("GITHUB_REF_NAME") or f"v{stated_versions()['covey/__init__.py']}"
    told = problems(tag)
    print("\n".join(told) or f"{tag} may be released")
    sys.exit(bool(told))
