"""The runs of a folder are found, told apart and read once, whatever is in them."""

import json
import math
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from covey.train.storage import take_lock
from covey_report.board import folder as module
from covey_report.board.folder import RunsFolder
from covey_report.diagnosis import RunHistory
from covey_report.evaluation import figures
from covey_report.public import public_runs
from covey_report.run_data import read_run


def look(runs: RunsFolder) -> dict[str, dict[str, Any]]:
    """Look until everything is read; return the rows of the list by name."""
    while runs.look():
        pass
    return {name: run.row() for name, run in runs.runs.items()}


def beat(folder: Path, **more: Any) -> None:
    content = {"now": time.time(), "host": os.uname().nodename, "step": 4, "total": 9}
    (folder / "heartbeat.json").write_text(json.dumps(content | more))


@pytest.fixture
def place(make_run: Any, tmp_path: Path) -> Path:
    """A folder with the run a, and the run b a level below."""
    make_run("runs/a", steps=4)
    make_run("runs/more/b", steps=4)
    return tmp_path / "runs"


def test_runs_are_found_by_what_is_in_them(place: Path, tmp_path: Path, make_run: Any) -> None:
    (place / "no-run").mkdir()
    (place / "more" / "note.txt").write_text("")
    make_run("elsewhere/c", steps=1)
    (place / "linked").symlink_to(tmp_path / "elsewhere" / "c")
    (place / "out").symlink_to(tmp_path / "elsewhere")  # a link is a run, or leads nowhere
    assert list(look(RunsFolder(place))) == ["a", "linked", "more/b"]
    assert list(look(RunsFolder(place / "a"))) == ["a"]
    assert look(RunsFolder(place / "missing")) == {}


def test_a_row_says_how_the_run_goes(place: Path) -> None:
    runs = RunsFolder(place)
    rows = look(runs)
    assert (rows["a"]["state"], rows["a"]["step"], rows["a"]["total"]) == ("finished", 4, 4)
    assert rows["a"]["figures"]["held-out"] == ["share", 1 / 3, 5 / 6]
    assert rows["a"]["about"] == ["quickstart", "grpo", "smollm2-135m"]
    assert rows["a"]["finding"]
    beat(place / "a", ended="failed", reason="an error")
    (place / "more" / "b" / "summary.json").unlink()
    assert (look(runs)["a"]["state"], runs.runs["a"].row()["reason"]) == ("failed", "an error")
    assert look(runs)["more/b"]["state"] == "dead"
    with take_lock(place / "a" / "checkpoints"):
        beat(place / "a", phase="rollout", left=60.0)
        row = look(runs)["a"]
        assert (row["state"], row["activity"], row["left"]) == ("running", "rollout", 60.0)
    beat(place / "a", ended="stopped", reason="SIGTERM")
    assert look(runs)["a"]["state"] == "stopped"


def test_a_change_and_its_error_are_those_of_the_report_and_of_the_diagnosis(place: Path) -> None:
    """Computed by prompt from the answers, which the board reads for that alone; a public page has them too."""
    (wanted,) = (row for row in figures(read_run(place / "a")) if row["name"] == "accuracy")
    runs = RunsFolder(place)
    look(runs)
    run = runs.runs["a"].data()
    independent = math.hypot(run.evaluation("before")["error"], run.evaluation("after")["error"])
    assert not run.before
    assert wanted["change"][1] > 2 * independent  # six prompts, of which one got worse
    for other in (run, *public_runs([read_run(place / "a")])):
        (shown,) = (row for row in figures(other) if row["name"] == "accuracy")
        assert shown["change"] == wanted["change"]
    gain = RunHistory.of(run).feature("held_out_gain")
    assert (gain.difference, gain.error) == (wanted["change"][0], pytest.approx(wanted["change"][1]))


def test_a_supervised_run_shows_its_accuracy(place: Path) -> None:
    recipe = (place / "a" / "recipe.yaml").read_text()
    (place / "a" / "recipe.yaml").write_text(recipe.replace("method: rl", "method: sft"))
    runs = RunsFolder(place)
    look(runs)
    summary = read_run(place / "a").summary
    shown = runs.runs["a"].row()["figures"]["held-out"]
    assert shown == ["share", summary["before"]["accuracy"], summary["after"]["accuracy"]]


def test_nothing_is_read_twice(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed, diagnosed = [], []
    parse, diagnose = module.parse_line, module.diagnose
    monkeypatch.setattr(module, "parse_line", lambda line: (parsed.append(line), parse(line))[1])
    monkeypatch.setattr(module, "diagnose", lambda history: (diagnosed.append(len(history)), diagnose(history))[1])
    runs = RunsFolder(place)
    look(runs)
    assert len(parsed) == 8
    parsed.clear()
    look(runs)
    assert (parsed, diagnosed) == ([], [4, 4])
    with (place / "a" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "reward": 0.5}\n{"step": 6, "re')
    assert look(runs)["a"]["last"] == 5
    assert parsed == [b'{"step": 5, "reward": 0.5}\n']
    assert diagnosed == [4, 4, 5]


def test_a_run_that_goes_on_is_diagnosed_seldom(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DIAGNOSIS_SHARE", 1e-9)
    runs = RunsFolder(place)
    with take_lock(place / "a" / "checkpoints"):
        look(runs)
        monkeypatch.setattr(module, "diagnose", lambda history: pytest.fail("it was diagnosed a moment ago"))
        with (place / "a" / "metrics.jsonl").open("a") as file:
            file.write('{"step": 5}\n')
        assert look(runs)["a"]["last"] == 5


def test_a_look_takes_a_limited_time(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.0)
    runs = RunsFolder(place)
    assert runs.look()
    assert [run.row()["state"] for run in runs.runs.values()] == ["finished", "finished"]  # known before they are read
    assert not any(run.row()["read"] for run in runs.runs.values())


def test_a_run_that_disappears_or_is_replaced_is_another(place: Path) -> None:
    runs = RunsFolder(place)
    look(runs)
    shutil.copytree(place / "a", place / "copy")
    shutil.rmtree(place / "a")
    assert list(look(runs)) == ["copy", "more/b"]
    (place / "copy" / "metrics.jsonl").write_text('{"step": 1, "reward": 1.0}\n')
    (place / "copy").rename(place / "a")
    assert look(runs)["a"]["last"] == 1
    shutil.rmtree(place)
    assert look(runs) == {}


def test_what_cannot_be_read_is_told_and_the_others_go_on(place: Path) -> None:
    (place / "more" / "b" / "recipe.yaml").write_text("a: [")
    (place / "a" / "metrics.jsonl").unlink()
    (place / "a" / "metrics.jsonl").symlink_to("/dev/zero")
    runs = RunsFolder(place)
    look(runs)
    rows = look(runs)  # still
    assert "no link is followed" in rows["a"]["error"]
    assert "recipe.yaml" in rows["more/b"]["error"]
