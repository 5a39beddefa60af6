"""`python -m benchmarks accelerator`: make all checks one after the other, or those that `--minutes` allow, and
write each down at once.

The same command continues a call that was stopped. This process never begins JAX: a TPU belongs to one process.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from rich.console import Console

from benchmarks.accelerator.__main__ import DESCRIBE
from benchmarks.accelerator.checks import CHECKS, Check
from benchmarks.accelerator.results import ERROR, FAILED, NOT_FINISHED, NOT_TRIED, PASSED, Outcome, Results
from benchmarks.accelerator.timetable import Running, Timetable
from benchmarks.common import Settings, with_python_path
from covey.display import make_console
from covey.errors import CoveyError

RESULTS = "results.json"
PATIENCE = 5.0
"""Number of times its minutes, and at least as many minutes, after which a check is ended."""
TINY = 0.05
"""Share of its minutes that a check takes on a CPU, where it has tiny sizes."""


def main(settings: Settings) -> int:
    """Make the checks that `settings` select and that are not finished; return 1 if one failed."""
    console, folder, began = make_console(highlight=False), settings.folder, time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    described = describe(folder)
    results = Results.resume(folder / RESULTS, described["identity"], described["machine"])
    names = settings.chosen(check.name for check in CHECKS)
    pending = [c for c in CHECKS if c.name in names and not is_final(results, c.name)]
    share = TINY if described["identity"]["platform"] == "cpu" else 1.0
    minutes = [share * check.minutes for check in pending]
    _show_start(
        console, described["identity"], len(names) - len(pending), len(pending), settings.minutes or sum(minutes)
    )

    def keep(check: Check, outcome: Outcome) -> None:
        results.checks = _ordered({**results.checks, check.name: outcome})
        results.save(folder / RESULTS)
        _show_outcome(console, outcome)

    if settings.minutes:
        _make_within(settings.minutes, pending, folder, began, console, keep)
    else:
        for number, check in enumerate(pending):
            left = f"{number + 1} of {len(pending)}, about {sum(minutes[number:]):.1f} min left"
            console.print(f"[bold]{check.name}[/] ({left}): {check.does}")
            keep(check, make(check, folder))
    return _show_end(console, results, folder / RESULTS)


def _make_within(
    minutes: float,
    checks: Sequence[Check],
    folder: Path,
    began: float,
    console: Console,
    keep: Callable[[Check, Outcome], None],
) -> None:
    """Make as many of the checks as the minutes allow."""

    def start(check: Check, more: Mapping[str, str]) -> tuple["subprocess.Popen[bytes]", Path]:
        console.print(f"{time.monotonic() - began:4.0f} s  [bold]{check.name}[/]: {check.does}")
        (folder / f"{check.file_name}.json").unlink(missing_ok=True)
        log = folder / f"{check.file_name}.log"
        with log.open("wb") as file:
            return started(check.name, folder, file, more, aside=True), log

    def ended(one: Running) -> None:
        console.print(f"{time.monotonic() - began:4.0f} s  [bold]{one.check.name}[/]")
        code = None if one.was_ended else one.process.returncode
        keep(one.check, outcome_of(one.check, folder, code, one.log, one.began, late=NOT_FINISHED))

    Timetable(folder, minutes, start, ended, began).make(checks)


def is_final(results: Results, name: str) -> bool:
    """Return whether an earlier call finished a check; one that failed is made again."""
    return name in results.checks and results.checks[name].is_final


def describe(folder: Path) -> dict[str, Any]:
    """Return the identity and the facts of this machine, which another process asks JAX for.

    Raises:
        CoveyError: JAX does not begin.
    """
    code, log = start(DESCRIBE, folder, 300.0)
    if code:
        raise CoveyError("JAX finds no devices: " + _tail(log), fix="covey doctor")
    described: dict[str, Any] = json.loads((folder / f"{DESCRIBE}.json").read_text(encoding="utf-8"))
    return described


def make(check: Check, folder: Path) -> Outcome:
    """Make a check in a process of its own, and return its outcome, however that process ends."""
    (folder / f"{check.file_name}.json").unlink(missing_ok=True)
    began = time.monotonic()
    code, log = start(check.name, folder, 60 * PATIENCE * max(check.minutes, 1))
    return outcome_of(check, folder, code, log, began)


def outcome_of(check: Check, folder: Path, code: int | None, log: Path, began: float, late: str = ERROR) -> Outcome:
    """Return the outcome of a check whose process ended with `code`, None if it was ended because it took too long. A
    check that did not come to its end has the rows that it had measured.

    Args:
        late: status of a check that took too long, unless one of its rows fails.
    """
    path, seconds = folder / f"{check.file_name}.json", round(time.monotonic() - began, 1)
    values = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"status": ERROR, "rows": []}
    outcome = replace(Outcome.from_json(values), seconds=seconds)
    if code == 0 and path.exists():
        return outcome
    how = f"took too long and was ended after {seconds:.0f} s" if code is None else f"ended with {code}"
    status = ERROR if code is not None else FAILED if any(row.fails for row in outcome.rows) else late
    told = _tail(log).splitlines()[-1:] if status == NOT_FINISHED else [_tail(log)]
    return replace(outcome, status=status, message=f"its process {how}: {''.join(told).strip()}")


def start(name: str, folder: Path, limit: float) -> tuple[int | None, Path]:
    """Run `python -m benchmarks.accelerator` for at most `limit` seconds; return its exit code, or None if it took
    longer, and the file of its messages.
    """
    log = folder / f"{name.replace(' ', '-')}.log"
    with log.open("wb") as file:
        process = started(name, folder, file)
        try:
            return process.wait(limit), log
        except subprocess.TimeoutExpired:
            return None, log
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def started(
    name: str, folder: Path, log: IO[bytes], more: Mapping[str, str] | None = None, aside: bool = False
) -> "subprocess.Popen[bytes]":
    """Start `python -m benchmarks.accelerator`. Its programs are kept, so that a run finds those of its plan.

    Args:
        more: further variables of its environment.
        aside: all that it says goes to `log`, and it can be ended with the processes that it starts.
    """
    kept = {"JAX_COMPILATION_CACHE_DIR": str(folder.absolute() / "compiled")}
    kept |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    words = [sys.executable, "-m", "benchmarks.accelerator", name, str(folder)]
    environment = with_python_path({**kept, **os.environ, **(more or {})})
    return subprocess.Popen(words, stdout=log if aside else None, stderr=log, env=environment, start_new_session=aside)


def _tail(log: Path) -> str:
    """Return the last lines of a file of messages."""
    return log.read_text(encoding="utf-8", errors="replace").strip()[-500:]


def _ordered(checks: dict[str, Outcome]) -> dict[str, Outcome]:
    return {check.name: checks[check.name] for check in CHECKS if check.name in checks}


def _show_start(console: Console, identity: Mapping[str, Any], finished: int, pending: int, minutes: float) -> None:
    devices = f"{identity['devices']} × {identity['device']}"
    console.print(f"{devices}: {pending} checks, about {minutes:.0f} min; Ctrl-C stops, and the same command goes on")
    if finished:
        console.print(f"{finished} finished by an earlier call")


def _show_outcome(console: Console, outcome: Outcome) -> None:
    colours = {PASSED: "green", NOT_TRIED: "yellow", NOT_FINISHED: "yellow"}
    status = f"[{colours.get(outcome.status, 'red')}]{outcome.status}[/] in {outcome.seconds:.0f} s"
    console.print(f"  {status}")
    if outcome.message:
        console.print(f"  {outcome.message}", markup=False, soft_wrap=True)


def _show_end(console: Console, results: Results, path: Path) -> int:
    """Print the table, its lines for RESULTS.md and where the file is; return the exit code."""
    console.print(results.table())
    console.print("Lines for benchmarks/RESULTS.md:")
    print(results.markdown())
    console.print(f"{path}: please send us this file in an issue", soft_wrap=True)
    return int(any(outcome.fails for outcome in results.checks.values()))
