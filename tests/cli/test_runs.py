"""`covey recipes copy`, and what all commands on runs share."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from covey.cli import main as cli
from covey.config import recipe

ROWS = [
    {"step": n, "reward": n / 10, "reward_error": 0.3, "kl": 0.1, "step_time": 2.0, "eval/accuracy": 0.5}
    for n in range(1, 21)
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_run(name: str, *settings: str, accuracy: float = 0.75) -> Path:
    folder = Path(name)
    (folder / "checkpoints" / "00000020").mkdir(parents=True)
    (folder / "recipe.yaml").write_text(recipe.to_yaml(recipe.load("quickstart", settings)))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    sample = {"step": 1, "group": 0, "sample": 0, "prompt": "secret question", "text": "x", "rewards": {"f": 1.0}}
    sample |= {"reward": 1.0, "advantage": 0.5, "finish": "stop", "prompt_length": 2, "length": 1}
    (folder / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    before = {"accuracy": 0.25, "error": 0.05}
    summary = {"before": before, "after": before | {"accuracy": accuracy}, "steps": 20, "seconds": 40.0}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


# --- covey recipes


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


@pytest.mark.parametrize("words", ["recipes", "recipes quickstart", "train --help", "compare a a"])
def test_a_reader_that_leaves_ends_a_command_quietly(words: str, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `covey recipes | head -1` does. The trap: rich ends the process with exit code 1."""
    if words.startswith("compare"):
        pytest.importorskip("covey_report")
    write_run("a")
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", closed)
        assert cli.main(words.split()) == 141
    assert capsys.readouterr().err == ""
