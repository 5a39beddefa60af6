"""`python -m benchmarks accelerator`: make all checks one after the other, and write down each at once.

The same command continues a call that was stopped. This process never begins JAX: a TPU belongs to one process.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.accelerator.__main__ import DESCRIBE, OUTCOME
from benchmarks.accelerator.checks import CHECKS, Check
from benchmarks.accelerator.results import ERROR, NOT_TRIED, PASSED, Outcome, Results
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
    console, folder = make_console(highlight=False), settings.folder
    folder.mkdir(parents=True, exist_ok=True)
    described = describe(folder)
    results = Results.resume(folder / RESULTS, described["identity"], described["machine"])
    names = settings.chosen(check.name for check in CHECKS)
    pending = [c for c in CHECKS if c.name in names and not is_final(results, c.name)]
    share = TINY if described["identity"]["platform"] == "cpu" else 1.0
    minutes = [share * check.minutes for check in pending]
    _show_start(console, described["identity"], len(names) - len(pending), minutes)
    for number, check in enumerate(pending):
        left = f"{number + 1} of {len(pending)}, about {sum(minutes[number:]):.1f} min left"
        console.print(f"[bold]{check.name}[/] ({left}): {check.does}")
        outcome = make(check, folder)
        results.checks = _ordered({**results.checks, check.name: outcome})
        results.save(folder / RESULTS)
        _show_outcome(console, outcome)
    return _show_end(console, results, folder / RESULTS)


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
    described: dict[str, Any] = json.loads((folder / OUTCOME).read_text(encoding="utf-8"))
    return described


def make(check: Check, folder: Path) -> Outcome:
    """Make a check in a process of its own, and return its outcome, however that process ends."""
    (folder / OUTCOME).unlink(missing_ok=True)
    began = time.monotonic()
    code, log = start(check.name, folder, 60 * PATIENCE * max(check.minutes, 1))
    seconds = round(time.monotonic() - began, 1)
    if not (folder / OUTCOME).exists():
        how = "took too long and was ended" if code is None else f"its process ended with {code}"
        return Outcome(ERROR, message=f"{how}: {_tail(log)}", seconds=seconds)
    return replace(Outcome.from_json(json.loads((folder / OUTCOME).read_text(encoding="utf-8"))), seconds=seconds)


def start(name: str, folder: Path, limit: float) -> tuple[int | None, Path]:
    """Run `python -m benchmarks.accelerator` for at most `limit` seconds; return its exit code, or None if it took
    longer, and the file of its messages. Its programs are kept, so that a run finds those of its plan.
    """
    log = folder / f"{name.replace(' ', '-')}.log"
    kept = {"JAX_COMPILATION_CACHE_DIR": str(folder.absolute() / "compiled")}
    kept |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    words = [sys.executable, "-m", "benchmarks.accelerator", name, str(folder)]
    with log.open("wb") as file:
        try:
            environment = with_python_path(kept | os.environ)
            done = subprocess.run(words, stderr=file, env=environment, timeout=limit, check=False)
        except subprocess.TimeoutExpired:
            return None, log
    return done.returncode, log


def _tail(log: Path) -> str:
    """Return the last lines of a file of messages."""
    return log.read_text(encoding="utf-8", errors="replace").strip()[-500:]


def _ordered(checks: dict[str, Outcome]) -> dict[str, Outcome]:
    return {check.name: checks[check.name] for check in CHECKS if check.name in checks}


def _show_start(console: Console, identity: Mapping[str, Any], finished: int, minutes: Sequence[float]) -> None:
    devices, duration = f"{identity['devices']} × {identity['device']}", f"{sum(minutes):.0f} min"
    console.print(f"{devices}: {len(minutes)} checks, about {duration}; Ctrl-C stops, and the same command goes on")
    if finished:
        console.print(f"{finished} finished by an earlier call")


def _show_outcome(console: Console, outcome: Outcome) -> None:
    colours = {PASSED: "green", NOT_TRIED: "yellow"}
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
    return int(any(not outcome.is_final for outcome in results.checks.values()))
