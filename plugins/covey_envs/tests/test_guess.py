"""An environment in whole runs: trained, stopped and resumed, evaluated, shown."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from covey import recipes
from covey.cli.main import main

pytestmark = pytest.mark.usefixtures("shared_programs", "small_scratch")

MODEL = ["--model.source", "scratch:guess-tiny"]
SMALL = [
    *MODEL, "--prompts-per-step", "4", "--num-generations", "4", "--slots", "8", "--max-tokens-per-micro-batch", "768",
    "--evaluation.prompts", "8", "--training.max-steps", "4", "--training.eval-every-n-steps", "0",
    "--training.checkpoint-every-n-steps", "2", "--actor-optimizer.schedule", "constant",
    "--actor-optimizer.warmup-ratio", "0",
]  # fmt: skip


def rows(run: Path, name: str) -> list[dict[str, Any]]:
    """The rows of a file of the run, without what differs between runs: times, and slots that waited."""
    found = [json.loads(line) for line in (run / name).read_text().splitlines()]
    return [{k: v for k, v in row.items() if not re.search("time|second|waste", k)} for row in found]


@pytest.mark.slow
def test_a_resumed_run_ends_as_one_that_was_never_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bit for bit: each token, each log-prob that entered a metric, each reward."""
    monkeypatch.chdir(tmp_path)
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    assert main(["train", "guess-tiny", *SMALL, "--out", str(straight)]) == 0
    shutil.copytree(straight, stopped)
    shutil.rmtree(stopped / "checkpoints" / "00000004")  # as one that was stopped after step 2
    recipes.resume(stopped, ["--envs.timeout", "30"])
    for name in ("samples.jsonl", "metrics.jsonl"):
        assert rows(stopped, name) == rows(straight, name)
    summary = json.loads((straight / "summary.json").read_text())
    assert summary["after"]["samples"] == 8
    assert summary["after"] == json.loads((stopped / "summary.json").read_text())["after"]
    last = rows(straight, "metrics.jsonl")[-1]
    assert 1 <= last["env/turns"] <= 5
    assert "rewards/guess/mean" in last
    sample = rows(straight, "samples.jsonl")[0]
    assert sample["text"].startswith("assistant: ")
    assert len(sample["turn_rewards"]) == len(sample["turn_ends"])
    capsys.readouterr()
    assert main(["eval", str(straight)]) == 0
    assert "accuracy" in capsys.readouterr().out


@pytest.mark.slow
def test_an_environment_with_state_in_its_class_stops_a_run_before_its_first_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stateful_game.py").write_text(
        "from covey import Step\n\n\n"
        "class Game:\n"
        "    turns = 0\n\n"
        "    def __init__(self, row):\n"
        "        self.prompt = row['prompt']\n\n"
        "    def reset(self):\n"
        "        return self.prompt\n\n"
        "    def step(self, reply):\n"
        "        Game.turns += 1\n"
        "        return Step(str(Game.turns), done=Game.turns > 9)\n"
    )
    assert main(["train", "guess-tiny", *SMALL, "--envs.environment", "stateful_game:Game", "--out", "run"]) == 2
    shown = capsys.readouterr()
    assert re.search(r"the courses\s+differ: message of turn 1 '1', then '5'", shown.err + shown.out)
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.slow
def test_a_few_episodes_are_played_without_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["rollout", "guess-tiny", *MODEL, "--episodes", "2"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"--- 1 of 2\n\d\d-\d\d:\nassistant: ", shown)
    ends = r"(ended by the environment|ended by envs\.max_turns|cut by a limit of tokens)"
    assert re.search(rf"\(reward \d.*, \d turns, \d+ tokens of the model, {ends}\)", shown)
    assert not (tmp_path / "runs").exists()
