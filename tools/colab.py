"""List the packages of Colab that an installation of Covey replaces: `make colab`, which asks a package index.

`colab_pins.txt` holds what Colab has. Packages whose version there is within Covey's ranges are kept, so that the
resolver changes as little as it can.
"""

import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
TOGETHER = {"jaxlib": "jax", "jax-cuda12-plugin": "jax", "jax-cuda12-pjrt": "jax"}
"""Packages that have the version of another one, which is in Covey's ranges."""


def colab_pins() -> dict[str, str]:
    """Return the versions in Colab's runtime, by package."""
    lines = (ROOT / "tools" / "colab_pins.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==", 1) for line in lines if not line.startswith("#"))


def replaced(pins: Mapping[str, str]) -> dict[str, str]:
    """Return the `pins` that Covey's ranges do not admit, and those that follow one of these."""
    outside = {one.name for one in requirements() if one.name in pins and pins[one.name] not in one.specifier}
    return {name: version for name, version in pins.items() if TOGETHER.get(name, name) in outside}


def requirements() -> list[Requirement]:
    """Return Covey's dependencies, without its extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [Requirement(line) for line in project["dependencies"]]


def resolve(pins: Mapping[str, str]) -> dict[str, str]:
    """Return the versions that pip chooses where all of `pins` but the replaced ones are kept."""
    kept = {name: version for name, version in pins.items() if name not in replaced(pins)}
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.writelines(f"{name}=={version}\n" for name, version in kept.items())
        constraints.flush()
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        command += ["--report", "-", "-c", constraints.name, *map(str, requirements())]
        report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    found = ((one["metadata"]["name"], one["metadata"]["version"]) for one in report["install"])
    return {name.lower().replace("_", "-"): version for name, version in found}


if __name__ == "__main__":
    pins = colab_pins()
    for name, version in sorted(resolve(pins).items()):
        if pins.get(name) != version:
            print(f"{name:20} {pins.get(name, '-'):10} {version}")
