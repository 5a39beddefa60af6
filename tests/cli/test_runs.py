"""What all commands on runs share."""

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


@pytest.mark.parametrize("words", ["recipes", "recipes quickstart", "train --help", "compare a a"])
def test_a_reader_that_leaves_ends_a_command_quietly(words: str, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `covey recipes | head -1` does. The trap: rich ends the process with exit code 1."""
    for verb, package in (("compare", "covey_report"), ("recipes", "covey_shell")):
        if words.startswith(verb):
            pytest.importorskip(package)
    write_run("a")
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", closed)
        assert cli.main(words.split()) == 141
    assert capsys.readouterr().err == ""
