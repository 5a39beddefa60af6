"""`envs.arguments`: what gets them, and what is said where it does not take them."""

import math
from pathlib import Path
from typing import Any

import pytest

from covey import EnvironmentRunner
from covey.config.recipe import load
from covey.config.schema import EnvsConfig
from covey.errors import RecipeError
from covey_envs.registry import resolve

GAMES = """
class Game:
    def __init__(self, row, size, level="easy"):
        self.row, self.size, self.level = row, size, level


class Anything:
    def __init__(self, row, **settings):
        self.settings = settings


class Tools:
    def __init__(self, start=0):
        self.counter = start

    def reset(self, **row):
        return None

    def add(self, step: int) -> int:
        \"\"\"
        Add to the counter.

        Args:
            step: The step.
        \"\"\"
        self.counter += step
        return self.counter
"""
ROW = {"prompt": "Play."}


@pytest.fixture(autouse=True)
def games(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "argument_games.py").write_text(GAMES)
    monkeypatch.syspath_prepend(str(tmp_path))


def runner(environment: Any, **arguments: Any) -> EnvironmentRunner:
    name = environment if isinstance(environment, str) else None
    return EnvironmentRunner(None if name else environment, EnvsConfig(environment=name, arguments=arguments))


def made(environment: Any, **arguments: Any) -> Any:
    with runner(environment, **arguments) as opened:
        return opened.submit(opened.make(ROW)).result(10)


def test_a_class_gets_them_behind_the_row() -> None:
    game = made("argument_games:Game", size=[4, {"deep": True}], level="hard")
    assert (game.row, game.size, game.level) == (ROW, [4, {"deep": True}], "hard")
    assert made("argument_games:Anything", any=None).settings == {"any": None}
    assert made(lambda row, size: (row, size), size=3) == (ROW, 3)


def test_a_class_for_trl_gets_them_alone() -> None:
    opened = runner("trl:argument_games:Tools", start=7)
    assert opened.name == "tools"
    assert opened._factory._make().counter == 7  # type: ignore[attr-defined]
    with pytest.raises(RecipeError, match=r"unexpected keyword argument 'star'(.|\n)*did you mean 'start'"):
        runner("trl:argument_games:Tools", star=7)


@pytest.mark.parametrize(
    ("environment", "arguments", "what"),
    [
        ("argument_games:Game", {"sise": 3}, r"missing a required argument: 'size'(.|\n)*row, size, level='easy'\)"),
        ("argument_games:Game", {"size": 3, "levl": 1}, r"unexpected keyword argument 'levl'(.|\n)*mean 'level'"),
        ("argument_games:Game", {"size": 3, "row": 1}, "multiple values for argument 'row'"),
        ("guess", {"size": 3}, "guess cannot be made: got an unexpected keyword argument 'size'"),
        (lambda row: row, {"size": 3}, "unexpected keyword argument 'size'"),
    ],
)  # fmt: skip
def test_arguments_that_it_does_not_take_are_named_before_anything_is_made(
    environment: Any, arguments: dict[str, Any], what: str
) -> None:
    with pytest.raises(RecipeError, match=what) as raised:
        runner(environment, **arguments)
    assert raised.value.where == "envs.arguments"


@pytest.mark.parametrize("value", [3, {1: 2}, {"a": object()}, {"a": [1, {"b": math.inf}]}, {"a": math.nan}])
def test_they_are_values_of_json(value: Any) -> None:
    with pytest.raises(RecipeError, match=r"envs\.arguments"):
        EnvsConfig(environment="guess", arguments=value)


def test_a_recipe_and_the_command_line_name_them(tmp_path: Path) -> None:
    path = tmp_path / "game.yaml"
    path.write_text("data: {task: jsonl, path: rows.jsonl}\nenvs:\n  environment: argument_games:Game\n")
    recipe: Any = load(path, ["--envs.arguments", "{size: 3, level: hard}"])
    assert recipe.envs.arguments == {"size": 3, "level": "hard"}
    path.write_text("data: {task: jsonl, path: rows.jsonl}\nrewards: [sentence]\nenvs: {arguments: {size: 3}}\n")
    with pytest.raises(
        RecipeError, match=r"envs\.arguments is set, and .* has no use for it(.|\n)*an envs\.environment"
    ):
        load(path)


def test_the_reset_of_a_server_gets_them_and_the_rows_own_win() -> None:
    pytest.importorskip("websockets")
    url = "openenv:http://127.0.0.1:9"
    make: Any = resolve(url, EnvsConfig(environment=url, arguments={"size": 3, "seed": 1}))
    assert make(ROW | {"seed": 9})._start == {"size": 3, "seed": 9}
    assert make(ROW | {"reset": {"size": 4}})._start == {"size": 4, "seed": 1}
