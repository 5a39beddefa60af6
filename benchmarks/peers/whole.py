"""Whole time of a run's first steps by the clock: from Enter, with imports, set-up, tracing and compiling.

Every library starts with an empty cache of compiled programs (cold), and then once more with the one that this left
behind (warm). Before that each is started once without a cache, so that its files are in memory. A process that waits
for its turn has a stopped clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.common import short
from benchmarks.peers.runner import CACHES, OURS, PEERS, PeerError, Runner, prepared, running, show, turns
from benchmarks.peers.work import Work

Found = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Figures by cache (cold, warm) and name."""


@dataclass(frozen=True)
class Clock:
    """Settings of a measurement.

    Attributes:
        numbers: the whole time of so many steps each.
        caches: cold, warm or both, in this order.
        folder: keeps the caches; None: they are temporary.
        at_most: steps that a peer takes, where that is less.
        warm_steps: steps that every peer takes from a warm cache, where that is less.
    """

    numbers: tuple[int, ...]
    caches: tuple[str, ...] = ("cold", "warm")
    folder: Path | None = None
    at_most: Mapping[str, int] | None = None
    warm_steps: int | None = None

    def steps(self, name: str, cache: str) -> int:
        """Return the number of steps that a peer takes."""
        limits = [max(self.numbers), (self.at_most or {}).get(name), self.warm_steps if cache == "warm" else None]
        return min(limit for limit in limits if limit is not None)


def measure(
    work: Work, shape: Mapping[str, Any], pythons: Mapping[str, str], clock: Clock
) -> tuple[Found, Mapping[str, Runner]]:
    """Return the figures, and the peers of the first cache with their steps.

    Raises:
        PeerError: a peer cannot run, or a kept cache is not what was asked for.
    """
    for name in pythons:
        _check_cache(name, clock)
    measured: dict[str, Mapping[str, Runner]] = {}
    with prepared(work, shape, pythons) as folder:
        with running(work, folder, pythons):
            pass
        for cache in clock.caches:
            measured[cache] = _run(cache, work, folder, pythons, clock)
    found = {
        cache: {name: whole(r, clock.numbers) for name, r in runners.items()} for cache, runners in measured.items()
    }
    return found, measured[clock.caches[0]]


def _run(cache: str, work: Work, folder: Path, pythons: Mapping[str, str], clock: Clock) -> Mapping[str, Runner]:
    with running(work, folder, pythons, clock.folder or folder / "caches") as runners:
        for number, name in turns({name: clock.steps(name, cache) for name in pythons}):
            show(number, f"{cache} {name}", runners[name].step())
    return runners


def _check_cache(name: str, clock: Clock) -> None:
    cache = clock.folder and clock.folder / name
    filled = cache is not None and cache.is_dir() and any(cache.iterdir())
    if filled and "cold" in clock.caches:
        raise PeerError(f"{cache} has programs already, and a cold run needs a folder without any")
    if not filled and "cold" not in clock.caches and PEERS[name].worker in CACHES:
        raise PeerError(
            f"a warm run of {name} finds no programs\n  run it with --cache cold --cache-folder PATH before, "
            "and with the same PATH now; or take --cache both"
        )


def whole(runner: Runner, numbers: Sequence[int]) -> dict[str, Any]:
    """Return the figures of one process: seconds until so many steps are over, None where it took fewer; 0 steps from
    Enter are the start.
    """
    until = [0.0, *accumulate(step["seconds"] for step in runner.steps)]
    spent = {n: until[n] if n < len(until) else None for n in (0, *numbers)}
    told = [runner.facts, *runner.steps]
    return {
        "from_enter": {n: None if x is None else short(runner.start + x) for n, x in spent.items()},
        "from_first_step": {n: None if x is None else short(x) for n, x in spent.items() if n},
        "steps": len(runner.steps),
        "tokens": short(sum(sum(step["lengths"]) for step in runner.steps) / len(runner.steps)),
        "programs": sum(t["compiled"] for t in told),
        "from_cache": sum(t["from_cache"] for t in told),
        "processor": short(runner.facts["processor"] + sum(step["cores"] * step["seconds"] for step in runner.steps)),
        "compile_seconds": short(sum(t["compile_seconds"] for t in told)),
    }


def tables(found: Found) -> dict[str, list[list[str]]]:
    """Return the tables by their titles, as rows of cells, the header first."""
    return {
        "Whole time in s, from Enter: start, compiling and steps. In brackets: times Covey's": _timed(
            found, "from_enter"
        ),
        "The same without the start: from the beginning of the first step": _timed(found, "from_first_step"),
        "Work of the whole process; programs, and the s to lower and to compile or load them": _counted(found),
    }


def _timed(found: Found, key: str) -> list[list[str]]:
    numbers = next(iter(next(iter(found.values())).values()))[key]
    rows = [["cache", "", *("start" if n == 0 else "1 step" if n == 1 else f"{n} steps" for n in numbers)]]
    for cache, peers in found.items():
        ours = peers[OURS][key] if OURS in peers else {}
        for name, told in peers.items():
            rows.append([cache, name, *(_time(x, ours.get(n) if name != OURS else None) for n, x in told[key].items())])
    return rows


def _time(seconds: float | None, ours: float | None) -> str:
    if seconds is None:
        return "not measured"
    told = f"{seconds:.0f}" if seconds >= 100 else f"{seconds:.3g}"
    return f"{told} ({seconds / ours:.2f}×)" if ours else told


def _counted(found: Found) -> list[list[str]]:
    rows = [["cache", "", *COUNTS.values()]]
    for cache, peers in found.items():
        rows += [[cache, name, *(f"{told[key]:g}" for key in COUNTS)] for name, told in peers.items()]
    return rows


COUNTS = {
    "steps": "steps",
    "tokens": "tokens per step",
    "processor": "processor s",
    "programs": "programs",
    "from_cache": "of them loaded",
    "compile_seconds": "in s",
}
"""Columns of the last table by figure."""
