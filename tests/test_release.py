"""What a release needs beside the package: the workflow, notices, the container, Colab's versions, former names."""

import importlib.util
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import covey
from covey import registry
from covey.cli.main import main

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def tool(name: str) -> ModuleType:
    """Import a script of tools/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- the workflow


def test_only_the_job_that_publishes_may_ask_for_an_identity_and_it_has_no_password() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    assert workflow[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads the key `on` as true
    assert workflow["permissions"] == {}
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    assert build["permissions"] == {"contents": "read"}
    assert publish["permissions"] == {"id-token": "write"}
    assert (publish["environment"], publish["needs"]) == ("pypi", "build")
    assert [step["uses"].partition("@")[0] for step in publish["steps"]][-1] == "pypa/gh-action-pypi-publish"
    assert "run" not in {key for step in publish["steps"] for key in step}
    assert re.search(r"secrets|password|[^-]token", str(workflow)) is None


@pytest.mark.parametrize("file", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda f: f.name)
def test_actions_are_pinned_to_commits(file: Path) -> None:
    used = re.findall(r"uses: (.*)", file.read_text())
    assert used
    assert [one for one in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", one)] == []


def test_a_tag_is_released_only_if_every_file_states_its_version(tmp_path: Path) -> None:
    problems = tool("release_tag").problems
    (tmp_path / "covey").mkdir()
    for name in ("pyproject.toml", "CITATION.cff", "covey/__init__.py", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    assert [told for told in problems(f"v{covey.__version__}", tmp_path) if "CHANGELOG" not in told] == []
    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text(changelog.read_text() + f"\n## [{covey.__version__}] - 2026-12-01\n")
    assert problems(f"v{covey.__version__}", tmp_path) == []
    assert len(problems("v9.9.9", tmp_path)) == 4


# --- notices


def test_every_embedded_script_and_style_is_named_in_the_notice() -> None:
    notice = (ROOT / "NOTICE").read_text()
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    if not listed:  # an unpacked sdist
        pytest.skip("this is no git checkout")
    embedded = [name for name in listed if re.search(r"\.min\.(js|css)$|LICENSE\.txt$", name)]
    assert len(embedded) >= 6
    assert [name for name in embedded if name not in notice] == []
    assert [name for name in re.findall(r"[\w./-]+\.(?:js|css|txt)\b", notice) if name not in listed] == []
    for name in embedded:
        assert not name.startswith("covey/") or name.endswith(("js", "css")) or name in PROJECT["license-files"]


# --- the container


def instructions() -> list[tuple[str, str]]:
    """Return name and arguments of each instruction of the Dockerfile."""
    lines = [line for line in DOCKERFILE.splitlines() if line and not line.startswith("#")]
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines)]


def test_the_dockerfile_copies_what_is_there() -> None:
    found = instructions()
    copied = [source for name, rest in found if name == "COPY" for source in rest.split()[:-1]]
    assert [source for source in copied if not (ROOT / source).exists()] == []
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {line[1:] for line in ignored if line.startswith("!")} == set(copied)
    built = {"pyproject.toml", PROJECT["readme"], *(name for name in PROJECT["license-files"] if "/" not in name)}
    assert built | {"covey", "plugins", "constraints.txt"} == set(copied)


def test_the_image_is_of_a_tested_python_for_a_user_without_rights(capsys: Any) -> None:
    found = instructions()
    values = dict(found)
    python = re.fullmatch(r"python:(3\.\d+)-slim", values["FROM"])
    assert python
    assert f"Programming Language :: Python :: {python[1]}" in PROJECT["classifiers"]
    assert f"(Python {python[1]})" in (ROOT / "constraints.txt").read_text().splitlines()[0]
    assert values["USER"] == "covey"
    assert [name for name, _ in found].index("USER") > max(n for n, (name, _) in enumerate(found) if name == "RUN")
    arguments = dict(rest.split("=") for name, rest in found if name == "ARG")
    assert set(arguments["EXTRAS"].split(",")) <= PROJECT["optional-dependencies"].keys()
    (command,), words = yaml.safe_load(values["ENTRYPOINT"]), yaml.safe_load(values["CMD"])
    assert command in PROJECT["scripts"]
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("covey: ")


# --- Colab


def test_the_page_lists_what_pip_replaces_in_colab() -> None:
    pytest.importorskip("packaging")
    colab = tool("colab")
    table = dict(re.findall(r"^\| ([a-z\d-]+) \| ([\d.]+) \|", (ROOT / "docs" / "gpu.md").read_text(), re.M))
    assert table == colab.replaced(colab.colab_pins())


# --- installation


def test_the_command_that_installs_an_extra_is_that_of_the_way_covey_came(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shlex.split(registry.install_command("hub"))[-1] == f"{ROOT}[hub]"
    monkeypatch.setattr(registry, "__file__", "/usr/lib/python3/site-packages/covey/registry.py")
    for direct_url, told in ((None, "pip install 'covey[hub]'"), ("{}", "pip install -e '.[hub]' in a clone of Covey")):
        found = type("Found", (), {"read_text": lambda self, name, text=direct_url: text})()
        monkeypatch.setattr(registry.importlib.metadata, "distribution", lambda name, found=found: found)
        assert registry.install_command("hub") == told
