"""The checks for machines with accelerators, in tiny sizes, and the command that makes them one after the other."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.accelerator import attention, checks, command, restart, timetable
from benchmarks.accelerator.__main__ import NOT_AT_END, run, write
from benchmarks.accelerator.checks import ALONE, BESIDE, CHECKS, PREPARED, Check, Context
from benchmarks.accelerator.results import ERROR, FAILED, NOT_FINISHED, NOT_TRIED, PASSED, NotTriedError, Outcome, Row
from benchmarks.accelerator.timetable import Timetable
from benchmarks.common import with_python_path
from covey.config import recipe
from covey_plan import doctor, roofline

DESCRIBED = {"identity": {"covey": "0.1.0", "platform": "gpu", "device": "a card", "devices": 1}, "machine": {}}


@pytest.mark.slow
@pytest.mark.usefixtures("shared_programs")
def test_the_tiny_sizes_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but those that start processes (tests/faults) and that take the same step in another type or shape."""
    monkeypatch.setattr(roofline, "STREAMED", 2**20)
    monkeypatch.setattr(roofline, "CALLS", 1)
    monkeypatch.setattr(doctor, "CHECKS", doctor.CHECKS[:3])  # the others have tests of their own
    monkeypatch.setattr(attention, "_platforms", lambda: [("cuda", True)])
    rows: dict[str, Row] = {}
    for name in ("machine", "attention", "decode attention", "2B"):
        outcome = run(by_name(name), Context(tmp_path, lambda text: None))
        assert (outcome.status, outcome.message) == (PASSED, "")
        rows |= {f"{name}: {row.what}": row for row in outcome.rows}
    assert {name.split(": ")[0] for name, row in rows.items() if row.bound} == {"attention", "decode attention", "2B"}
    # Not the peak of memory: this process may have held more before, and then it is not told.
    planned = ("rollout", "logps", "update", "decode step, beside its bound")
    assert all((rows[f"2B: {what}"].expected or 0) > 0 for what in planned)
    shares = [row.measured for row in rows.values() if "share" in row.what]
    assert len(shares) == 8
    assert all(share > 0 for share in shares)
    assert (tmp_path / "profile.txt").read_text().count(" ms ") >= 4


def test_the_run_that_is_killed_saves_each_step_and_needs_one_device() -> None:
    loaded = recipe.load("arithmetic-tiny", restart.settings())
    assert (loaded.training.max_steps, loaded.training.checkpoint_every_n_steps) == (restart.STEPS, 1)
    assert (loaded.model.mesh.data, loaded.model.mesh.fsdp, loaded.model.mesh.tp) == (1, 1, 1)


def by_name(name: str) -> Check:
    return next(check for check in CHECKS if check.name == name)


def passes(context: Context) -> Iterator[Row]:
    yield Row("seconds", 3.0, 2.0, "s")


def is_beyond(context: Context) -> Iterator[Row]:
    yield Row("difference", 3.0, 2.0, bound=True)
    yield Row("difference", float("nan"), 2.0, bound=True)


def raises(context: Context) -> Iterator[Row]:
    yield Row("seconds", 3.0)
    raise ValueError("no such | kernel")


def is_alone(context: Context) -> Iterator[Row]:
    raise NotTriedError("there is one device")
    yield


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the checks that were made, here and not in processes of their own; of four that are made up."""
    functions: dict[str, Callable[[Context], Any]] = {f.__name__: f for f in (passes, raises, is_beyond, is_alone)}
    monkeypatch.setattr(checks, "resolve_name", lambda path: functions[path.split(":")[1]])
    monkeypatch.setattr(command, "CHECKS", [Check(name, f":{name}", "does it", 1.0) for name in functions])
    monkeypatch.setattr(command, "describe", lambda folder: DESCRIBED)
    names: list[str] = []

    def make(check: Check, folder: Path) -> Outcome:
        names.append(check.name)
        return run(check, Context(folder, print))

    monkeypatch.setattr(command, "make", make)
    return names


def test_a_check_that_raises_is_recorded_and_the_others_go_on(
    made: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["accelerator", "--folder", str(tmp_path)]) == 1
    values = json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)
    statuses = {name: one["status"] for name, one in values["checks"].items()}
    assert statuses == {"passes": PASSED, "raises": ERROR, "is_beyond": FAILED, "is_alone": NOT_TRIED}
    assert values["checks"]["raises"]["message"] == "ValueError: no such | kernel"
    assert [row["measured"] for row in values["checks"]["is_beyond"]["rows"]] == [3.0, None]  # NaN is no JSON
    assert [row.fails for row in Outcome.from_json(values["checks"]["is_beyond"]).rows] == [True, True]
    told = capsys.readouterr().out
    assert "| passes | seconds | 2 s | 3 s | 1.5 |" in told
    assert "| raises | error: ValueError: no such \\| kernel |" in told
    assert "| is_beyond | difference (failed) | ≤ 2 | 3 | 1.5 |" in told


def test_a_call_that_was_stopped_is_gone_on_with(
    made: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is finished is skipped, what failed is made again; on another device or version all is."""
    words, make = ["accelerator", "--folder", str(tmp_path)], command.make

    def stop(check: Check, folder: Path) -> Outcome:
        if check.name == "raises":
            raise KeyboardInterrupt
        return make(check, folder)

    monkeypatch.setattr(command, "make", stop)
    assert main(words) == 130
    monkeypatch.setattr(command, "make", make)
    assert (main(words), main(words)) == (1, 1)
    assert made == ["passes", "raises", "is_beyond", "is_alone", "raises", "is_beyond"]
    monkeypatch.setitem(DESCRIBED, "identity", {"platform": "gpu", "device": "another card", "devices": 1})
    assert main([*words, "--only", "passes"]) == 0
    assert made[6:] == ["passes"]
    assert (tmp_path / "results.earlier.json").exists()


def test_a_process_that_dies_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it had measured before stays."""

    def start(name: str, folder: Path, limit: float) -> tuple[int | None, Path]:
        (folder / "log").write_text("the driver is gone\n")
        if not codes[1:]:
            write(by_name("8B"), folder, Outcome(ERROR, (Row("rollout", 3.0),), NOT_AT_END))
        return codes.pop(0), folder / "log"

    codes = [-9, 1, None]
    monkeypatch.setattr(command, "start", start)
    outcomes = [command.make(by_name("8B"), tmp_path) for _ in range(3)]
    assert [outcome.message for outcome in outcomes] == [
        "its process ended with -9: the driver is gone",
        "its process ended with 1: the driver is gone",
        "its process took too long and was ended after 0 s: the driver is gone",
    ]
    assert [[row.what for row in outcome.rows] for outcome in outcomes] == [[], [], ["rollout"]]


@pytest.mark.parametrize(("measured", "status"), [(1.0, NOT_FINISHED), (3.0, FAILED)])
def test_a_check_for_which_the_minutes_do_not_suffice_is_not_finished(
    measured: float, status: str, tmp_path: Path
) -> None:
    """It is no fault, unless a row is beyond its bound; the next call repeats it."""
    rows = (Row("difference", measured, 2.0, bound=True),)
    write(by_name("8B"), tmp_path, Outcome(ERROR, rows, NOT_AT_END))
    (tmp_path / "log").write_text("compiling\n  the first step\n")
    outcome = command.outcome_of(by_name("8B"), tmp_path, None, tmp_path / "log", time.monotonic(), NOT_FINISHED)
    assert (outcome.status, outcome.rows, outcome.is_final) == (status, rows, False)
    assert outcome.fails is (status == FAILED)
    assert ("compiling" in outcome.message) is (status == FAILED)


def test_each_row_is_written_as_it_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "resolve_name", lambda path: measured)
    seen: list[list[str]] = []

    def measured(context: Context) -> Iterator[Row]:
        for what in ("first", "second"):
            yield Row(what, 1.0)
            values = json.loads((tmp_path / "made-up.json").read_text())
            seen.append([values["status"], *(row["what"] for row in values["rows"])])

    assert run(Check("made up", ":measured", "", 1.0), Context(tmp_path, lambda text: None)).status == PASSED
    assert seen == [[ERROR, "first"], [ERROR, "first", "second"]]


SCRIPT = """
import os, sys, time
from pathlib import Path
from benchmarks.accelerator.turn import wait_for_turn
note = lambda what: print(sys.argv[1], what, flush=True, file=open(sys.argv[2], "a"))
note("begins"), time.sleep(float(sys.argv[3])), wait_for_turn(), note("goes on"), time.sleep(0.5), note("ends")
"""


@pytest.mark.slow
def test_timed_checks_are_alone_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They compile beside the others, and a check that never ends takes no more than its share of the minutes."""
    monkeypatch.setattr(timetable, "BARRIER", 0.2)
    ended = list[str]()
    waits = {"machine": "0", "attention": "0.2", "endless": "100", "2B": "0.2", "8B": "0.1", "peer": "0"}
    turns = {"machine": ALONE, "attention": BESIDE, "endless": BESIDE, "2B": PREPARED, "8B": PREPARED, "peer": ALONE}

    def start(check: Check, more: dict[str, str]) -> tuple["subprocess.Popen[bytes]", Path]:
        words = [sys.executable, "-c", SCRIPT, check.name, str(tmp_path / "notes"), waits[check.name]]
        process = subprocess.Popen(words, env=with_python_path({**os.environ, **more}), start_new_session=True)
        return process, tmp_path / "log"

    made = [Check(name, ":", "", 1.0, turn=turn) for name, turn in turns.items()]
    Timetable(tmp_path, 1.0, start, lambda one: ended.append(one.check.name), time.monotonic()).make(made)
    assert ended == list(turns)
    notes = (tmp_path / "notes").read_text().splitlines()
    assert notes[:3] == ["machine begins", "machine goes on", "machine ends"]
    timed = [note for note in notes if note.split()[0] in ("2B", "8B", "peer") and not note.endswith("begins")]
    assert timed == [f"{name} {what}" for name in ("2B", "8B", "peer") for what in ("goes on", "ends")]
    assert notes.index("attention ends") < notes.index("2B goes on")
    assert notes.index("8B begins") < notes.index("2B goes on")
    assert "endless ends" not in notes
