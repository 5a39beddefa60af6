"""A trace of some work, in words: the longest operations, and the share of time in which the device computes."""

import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

LONGEST = 15
"""Number of operations that are listed."""
NUMBER = re.compile(r"\.\d+$")


class Operation(NamedTuple):
    """One execution of an operation on a device; times in nanoseconds."""

    name: str
    start: float
    end: float


class Profile(NamedTuple):
    """Result of a trace.

    Attributes:
        seconds: time that the work took.
        busy: seconds in which at least one operation ran.
        operations: number of operations that ran.
        listing: the operations that took longest, a line each.
    """

    seconds: float
    busy: float
    operations: int
    listing: str


def profiled(work: Callable[[], Any]) -> Profile:
    """Return the profile of `work`, whose results it waits for."""
    with tempfile.TemporaryDirectory(prefix="covey-trace-") as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        with jax.profiler.trace(folder, profiler_options=options):
            start = time.perf_counter()
            jax.block_until_ready(work())
            seconds = time.perf_counter() - start
        operations = [one for file in Path(folder).rglob("*.xplane.pb") for one in _operations(file)]
    times: dict[str, list[float]] = defaultdict(list)
    for one in operations:
        times[one.name].append((one.end - one.start) / 1e9)
    return Profile(seconds, _covered(operations) / 1e9, len(operations), _listing(times))


def _operations(file: Path) -> Iterator[Operation]:
    """Yield the operations that ran on devices; on a CPU, whose trace has no device, those of its threads."""
    planes = list(jax.profiler.ProfileData.from_file(str(file)).planes)
    devices = [plane for plane in planes if plane.name.startswith("/device:")]
    for plane in devices or [plane for plane in planes if plane.name.startswith("/host:CPU")]:
        for line in plane.lines:
            for event in line.events:
                stats = {str(key): value for key, value in event.stats}
                operation = stats.get("hlo_op")
                if operation is not None:
                    program = str(stats.get("hlo_module", "")).removeprefix("jit_")
                    name = f"{program}: {NUMBER.sub('', str(operation))}"
                    yield Operation(name, event.start_ns, event.start_ns + event.duration_ns)


def _covered(operations: Iterable[Operation]) -> float:
    """Return the length of the union of their times."""
    total, end = 0.0, 0.0
    for one in sorted(operations, key=lambda one: one.start):
        total, end = total + max(0.0, one.end - max(one.start, end)), max(one.end, end)
    return total


def _listing(times: Mapping[str, list[float]]) -> str:
    total = sum(map(sum, times.values())) or 1.0
    longest = sorted(times.items(), key=lambda item: -sum(item[1]))[:LONGEST]
    return "\n".join(
        f"{1e3 * sum(each):10.3f} ms {sum(each) / total:6.1%} {len(each):6d} × {name}" for name, each in longest
    )
