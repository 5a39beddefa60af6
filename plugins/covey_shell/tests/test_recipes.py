"""`covey recipes`: the built-in recipes as a table, as text, and as a file to change."""

import json
from pathlib import Path
from typing import Any

import pytest

from covey.cli import main as cli
from covey.config import recipe


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_recipe_is_copied_to_a_new_file(capsys: Any) -> None:
    assert cli.main(["recipes", "copy", "sft-tiny", "mine.yaml"]) == 0
    assert capsys.readouterr().out == "mine.yaml: change it, then covey sft mine.yaml\n"
    assert recipe.load_any("mine.yaml") == recipe.load_any("sft-tiny")
    for words, told in (
        (["sft-tiny", "mine.yaml"], "something is already here"),
        (["sft-tiny", "no/mine.yaml"], "fix: mkdir -p no"),
        (["sft-tny", "other.yaml"], "did you mean 'sft-tiny'?"),
        (["sft-tiny"], "wanted: covey recipes copy NAME FILE"),
    ):
        assert cli.main(["recipes", "copy", *words]) == 2
        assert told in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == ["mine.yaml"]


@pytest.mark.slow
def test_recipes_are_listed_for_programs(capsys: Any) -> None:
    assert cli.main(["recipes", "--json"]) == 0
    listed = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert listed.keys() == set(recipe.names())
    assert listed["sft-tiny"]["command"] == "covey sft"


@pytest.mark.parametrize("columns", ["", "90"])
def test_the_table_of_recipes_is_as_wide_as_a_page_in_a_pipe(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert cli.main(["recipes"]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= int(columns or 120)
    assert {line.split()[0] for line in lines if line} >= {*recipe.names()}
