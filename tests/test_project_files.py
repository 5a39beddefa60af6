"""The files around the package agree with it: the workflows, and the script of CI."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read(file: Path) -> dict[Any, Any]:
    content: dict[Any, Any] = yaml.safe_load(file.read_text())
    return content


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda f: f.name)
def test_workflows_run_targets_of_the_makefile(file: Path) -> None:
    commands = [step["run"] for job in read(file)["jobs"].values() for step in job["steps"] if "run" in step]
    assert commands
    for command in commands:
        target = re.fullmatch(r"make ([a-z-]+) PYTHON=python", command)
        assert target, command
        assert re.search(rf"^{target[1]}:", MAKEFILE, re.M), command


def test_workflows_lint_test_and_build_on_every_python_that_is_declared() -> None:
    jobs = {name: job for file in WORKFLOWS for name, job in read(file)["jobs"].items()}
    assert {"lint", "test", "build"} <= jobs.keys()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    prefix = "Programming Language :: Python :: 3."
    declared = [name.removeprefix(prefix) for name in project["classifiers"] if name.startswith(prefix)]
    assert jobs["test"]["strategy"]["matrix"]["python"] == [f"3.{minor}" for minor in declared]
    assert project["requires-python"] == f">=3.{declared[0]}"


def test_ci_runs_in_a_folder_of_the_name_that_git_gives_a_clone(tmp_path: Path) -> None:
    """The trap: a test that held only where no folder above the package is named covey."""
    checkout, programs, log = tmp_path / "checkout", tmp_path / "bin", tmp_path / "log"
    (checkout / ".ci").mkdir(parents=True)
    programs.mkdir()
    shutil.copy(ROOT / ".ci" / "run", checkout / ".ci")
    for name in ("make", "chromium"):
        (programs / name).write_text(f'#!/bin/sh\necho "$PWD" "$@" >> {log}\n')
        (programs / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    subprocess.run([checkout / ".ci" / "run"], env=environment, check=True)
    folders, commands = zip(*(line.split(" ", 1) for line in log.read_text().splitlines()), strict=True)
    assert commands == ("docs", "test")
    assert {Path(folder).name for folder in folders} == {"covey"}
    assert not Path(folders[0]).exists()
