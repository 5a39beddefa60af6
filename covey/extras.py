"""Find missing optional packages of Covey, and the command that installs them."""

import importlib.metadata
import re
import shlex
from pathlib import Path


def install_command(extra: str = "") -> str:
    """Return the command that reinstalls Covey with the packages of `extra`.

    It names the clone that Covey runs from, if it does, and the package index only if Covey came from there.
    """
    clone = Path(__file__).resolve().parents[1]
    named = f"[{extra}]" if extra else ""
    if (clone / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{clone}{named}')}"
    if importlib.metadata.distribution("covey").read_text("direct_url.json") is None:
        return f"pip install {shlex.quote(f'covey{named}')}"
    return f"pip install -e '.{named}' in a clone of Covey"


def missing_packages(extra: str) -> list[str]:
    """Return the packages of `extra` that are not installed, according to the metadata of the installed Covey.

    Raises:
        PackageNotFoundError: Covey itself is not installed.
    """
    marker = re.compile(rf"""extra\s*==\s*['"]{re.escape(extra)}['"]""")
    wanted = [line for line in importlib.metadata.requires("covey") or () if marker.search(line)]
    return [name for name in map(_name, wanted) if not _is_installed(name)]


def _name(requirement: str) -> str:
    """Return the package name of a requirement.

    >>> _name("jax[cuda12]>=0.10; extra == 'cuda'")
    'jax'
    """
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
