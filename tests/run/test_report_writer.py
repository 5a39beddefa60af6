"""Reports of a run while it trains: rarely enough, in one process, and never its end."""

import logging
import shutil
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from covey.config import recipe
from covey.run import report_writer
from covey.run.environment import describe_environment
from covey.run.report_writer import INTERVAL, MAX_SHARE, ReportWriter


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml(recipe.load("quickstart")))
    return SimpleNamespace(path=tmp_path, given=Path("runs/a"), writes=True)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that moves when `now` is set; a report takes `cost` seconds on it."""
    clock = SimpleNamespace(now=0.0, cost=0.0, written=[])
    monkeypatch.setattr(report_writer.time, "monotonic", lambda: clock.now)

    def write(out: Path, folders: list[Path]) -> None:
        clock.written.append(clock.now)
        clock.now += clock.cost

    monkeypatch.setattr(report_writer, "write_report", write)
    return clock


def test_a_report_is_written_into_the_folder(folder: Any) -> None:
    assert ReportWriter(folder).write()
    assert (folder.path / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_reports_take_a_hundredth_of_the_time_though_the_files_grow(folder: Any, clock: SimpleNamespace) -> None:
    writer = ReportWriter(folder)
    while clock.now < 50_000:  # steps of a second each
        clock.now += 1.0
        clock.cost = clock.now / 10_000
        writer.write_if_due()
        if clock.written and clock.written[-1] > 100:
            assert sum(at / 10_000 for at in clock.written) <= MAX_SHARE * clock.now
    assert clock.written[0] == INTERVAL
    assert all(after - before >= INTERVAL for before, after in pairwise(clock.written))
    assert len(clock.written) > 10


def test_only_the_process_that_writes_the_folder_writes_reports(folder: Any) -> None:
    folder.writes = False
    assert not ReportWriter(folder).write()
    assert not (folder.path / "report.html").exists()


def test_a_failure_is_told_once_and_ends_nothing(folder: Any, caplog: pytest.LogCaptureFixture) -> None:
    (folder.path / "report.html").mkdir()
    writer = ReportWriter(folder)
    with caplog.at_level(logging.WARNING, "covey"):
        assert not writer.write()
        assert not writer.write()
    (told,) = caplog.messages
    assert "report.html could not be written" in told
    assert "covey report runs/a" in told
    shutil.rmtree(folder.path / "report.html")
    assert writer.write()


def test_the_environment_is_recorded_without_names_of_machine_or_user() -> None:
    found = describe_environment()
    assert {"covey", "python", "jax", "jaxlib", "devices", "cores"} <= found.keys()
    assert "cpu" in found["devices"]
    assert all(isinstance(text, str) and "/" not in text for text in found.values())
