"""The tables of names: each `module:attribute` exists and points downwards as an import does; packages add more."""

import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from covey.cli.checks import checks_of
from covey.cli.commands import COMMANDS
from covey.config import recipe
from covey.envs import registry as envs
from covey.errors import RecipeError
from covey.registry import import_name
from covey.rewards import registry as rewards

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
REGISTRIES = {"rewards": rewards.REGISTRY, "envs": envs.ENVIRONMENT_REGISTRY, "tools": envs.TOOL_REGISTRY}
HOMES = {"rewards": "covey.rewards.registry", "envs": "covey.envs.registry", "tools": "covey.envs.registry"}


def layer_of(module: str) -> int:
    """Number of the layer of a module, from the highest; those of one line share it."""
    layers = PROJECT["tool"]["importlinter"]["contracts"][0]["layers"]
    names = [[name.strip() for name in line.replace("|", ":").split(":")] for line in layers]
    return next(i for i, line in enumerate(names) if any(module == n or module.startswith(f"{n}.") for n in line))


@pytest.mark.parametrize("name", REGISTRIES)
def test_every_name_of_a_table_leads_to_something_callable(name: str) -> None:
    registry = REGISTRIES[name]
    assert registry.table
    for known in registry.table:
        assert callable(registry.resolve(known))


def test_every_command_names_its_function() -> None:
    for name, command in COMMANDS.items():
        assert name == command.name
        assert callable(import_name(command.function))


def test_every_check_names_its_function() -> None:
    changes = ["--model.adapter=a", "--reward-model=b", "--data.task=jsonl", "--data.path=c"]
    checks = [*checks_of(recipe.load("tools-smollm2", changes)), *checks_of(recipe.load("guess-tiny"))]
    assert len({check.subject for check in checks}) == 8
    assert all(callable(import_name(check.function)) for check in checks)


@pytest.mark.parametrize("name", REGISTRIES)
def test_a_name_imports_nothing_above_its_table(name: str) -> None:
    """A string hides an import from the contract on imports."""
    targets = {value.partition(":")[0] for value in REGISTRIES[name].table.values()}
    targets |= set(envs.ADAPTERS.values()) if name == "envs" else set()
    assert [module for module in targets if layer_of(module) < layer_of(HOMES[name])] == []


def test_an_installed_package_adds_an_environment_and_a_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "covey_example_games-1.0.dist-info").mkdir()
    folder = tmp_path / "covey_example_games-1.0.dist-info"
    (folder / "METADATA").write_text("Name: covey_example_games\nVersion: 1.0\n")
    points = "[covey.environments]\nnim = covey_example_games:Nim\n[covey.tools]\ncount = covey_example_games:count\n"
    (folder / "entry_points.txt").write_text(points)
    text = "class Nim:\n    def __init__(self, row):\n        pass\n\n\ndef count(word):\n    return len(word)\n"
    (tmp_path / "covey_example_games.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    games = import_module("covey_example_games")
    assert envs.resolve("nim") is games.Nim
    assert envs.resolve_tool("count") is games.count
    with pytest.raises(RecipeError, match="did you mean 'nim'"):
        envs.resolve("nimm")
