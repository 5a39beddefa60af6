"""Reports and the diagnosis of a run cost little and end nothing."""

import json
import logging
import shutil
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from covey.config import recipe
from covey.display import show_log
from covey.monitor.record import StepRecord
from covey_report import outputs
from covey_report.outputs import INTERVAL, MAX_SHARE, FindingsLog, ReportWriter

STEPS = 12
RECIPE = recipe.load("quickstart")


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml(RECIPE))
    return SimpleNamespace(path=tmp_path, path_as_given=Path("runs/a"), writes=True, resuming=False)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that moves when `now` is set; a report takes `cost` seconds on it."""
    clock = SimpleNamespace(now=0.0, cost=0.0, written=[])
    monkeypatch.setattr(outputs.time, "monotonic", lambda: clock.now)

    def write(out: Path, folders: list[Path], status: str) -> None:
        clock.written.append(clock.now)
        clock.now += clock.cost

    monkeypatch.setattr(outputs, "write_report", write)
    return clock


def writer_of(folder: Any) -> ReportWriter:
    writer = ReportWriter()
    writer.begin(SimpleNamespace(folder=folder), {})  # type: ignore[arg-type]
    return writer


def record_of(row: dict[str, Any]) -> StepRecord:
    return StepRecord(row["step"], 1, 0, row)


def test_a_report_is_written_into_the_folder(folder: Any) -> None:
    assert writer_of(folder).end("") == {"report": "runs/a/report.html"}
    assert (folder.path / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_reports_take_a_hundredth_of_the_time_though_the_files_grow(folder: Any, clock: SimpleNamespace) -> None:
    writer = writer_of(folder)
    while clock.now < 50_000:  # steps of a second each
        clock.now += 1.0
        clock.cost = clock.now / 10_000
        writer.step(record_of({"step": 1}))
        if clock.written and clock.written[-1] > 100:
            assert sum(at / 10_000 for at in clock.written) <= MAX_SHARE * clock.now
    assert clock.written[0] == INTERVAL
    assert all(after - before >= INTERVAL for before, after in pairwise(clock.written))
    assert len(clock.written) > 10


def test_only_the_process_that_writes_the_folder_writes_reports(folder: Any) -> None:
    folder.writes = False
    assert writer_of(folder).end("") == {}
    assert not (folder.path / "report.html").exists()


def test_a_failure_is_told_once_and_ends_nothing(folder: Any, caplog: pytest.LogCaptureFixture) -> None:
    (folder.path / "report.html").mkdir()
    writer = writer_of(folder)
    with caplog.at_level(logging.WARNING, "covey"):
        assert not writer.write()
        assert not writer.write()
    (told,) = caplog.messages
    assert "report.html could not be written" in told
    assert "covey report runs/a" in told
    shutil.rmtree(folder.path / "report.html")
    assert writer.write()


def rows(count: int = STEPS, **values: float) -> list[dict[str, Any]]:
    same = {"reward": 0.3, "reward_std": 0.0, "reward_error": 0.0, "frac_reward_zero_std": 1.0, "learning_rate": 1e-5}
    return [{"step": number, **same, **values} for number in range(1, count + 1)]


def said(folder: Any, steps: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Messages and warnings of a run with these rows."""
    messages: list[str] = []
    warnings: list[str] = []
    with show_log(messages.append, warnings.append):
        log = FindingsLog()
        run: Any = SimpleNamespace(recipe=RECIPE, folder=folder)
        log.begin(run, {"before": {"accuracy": 0.1, "pass@k": None}})
        with (folder.path / "metrics.jsonl").open("a") as file:
            for row in steps:
                file.write(json.dumps(row) + "\n")
                log.step(record_of(row))
        log.end("")
    return messages, warnings


def test_a_problem_is_said_once_and_again_at_the_end(folder: Any) -> None:
    messages, (during, at_the_end) = said(folder, rows())
    assert during.startswith("step 2: The reward is the same for every completion")
    assert "every completion of 2 steps scored 0.3 (128 completions)" in during
    assert "Change: see in samples.jsonl" in during
    assert at_the_end.startswith("diagnosis: The reward is the same for every completion")
    assert f"every completion of {STEPS} steps" in at_the_end
    assert messages == []


def test_a_sound_run_says_so_without_a_warning(folder: Any) -> None:
    steps = [row | {"reward": 0.1 * row["step"], "reward_std": 0.3} for row in rows()]
    (message,), warnings = said(folder, steps)
    assert message.startswith("diagnosis: Nothing wrong was found. Seen: the mean reward went 0.2 (steps 1 to 3)")
    assert warnings == []


def test_a_resumed_run_knows_its_steps_before(folder: Any) -> None:
    (folder.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(20)))
    folder.resuming = True
    _, (during, _) = said(folder, rows(40)[20:])
    assert during.startswith("step 21: ")
    assert "every completion of 21 steps" in during


def test_a_problem_that_is_not_met_any_more_is_withdrawn_aloud(folder: Any) -> None:
    rewarded = [row | {"reward": 0.1 * row["step"], "reward_std": 0.3} for row in rows()]
    _, (told, withdrawn, *_) = said(folder, rows(4) + rewarded[4:])
    assert told.startswith("step 2: The reward is the same")
    assert withdrawn.startswith("step 9: Withdrawn: The reward is the same for every completion")


def test_only_the_process_that_writes_says_it(folder: Any) -> None:
    folder.writes = False
    assert said(folder, rows()) == ([], [])
