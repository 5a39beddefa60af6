"""Code that the workers share: the line to the driver and the clock of a step. It uses the standard library alone.

A worker is one process in its library's environment. It gets the work as a line of JSON, says when it is set up, and
then takes a step for each line that comes; in between it waits and computes nothing. What its library prints goes to
standard error.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.peers.work import Work

COMPILING = ("/jax/core/compile/jaxpr_to_mlir_module_duration", "/jax/core/compile/backend_compile_duration")
"""Events of JAX about a program: it is lowered, and compiled or loaded from the cache."""
LOADED = "/jax/compilation_cache/cache_hits"


class Steps:
    """Clock of the steps of a library's own training loop, which calls `turn` between two of them.

    Attributes:
        work: what to do.
        folder: the checkpoint.
        options: what sets one variant of a library apart from another.
        lengths: tokens of each completion of the step, the stop token included; the worker puts them here.
        phases: seconds of each phase of the step.
        compiled, from_cache: programs that the step made ready, and those of them that came from the cache on disk.
        compile_seconds: what that took.
    """

    def __init__(self) -> None:
        self._replies = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        asked = json.loads(sys.stdin.readline())
        self.work, self.folder, self.options = Work(**asked["work"]), asked["folder"], asked["options"]
        self.lengths: Sequence[int] = ()
        self.phases: dict[str, float] = {}
        self._forget_programs()
        self._began = time.perf_counter()
        self._at: dict[str, float] | None = None

    def ready(self, parameters: int, trainable: int, packages: Sequence[str]) -> None:
        """Report that the model is loaded and a step follows."""
        self._tell(
            setup=round(time.perf_counter() - self._began, 2),
            processor=round(time.process_time(), 2),
            parameters=parameters,
            trainable=trainable,
            versions={name: version(name) for name in packages},
            peak_gib=peak_gib(),
            **self._programs(),
        )

    def turn(self) -> None:
        """Report the step that is over, and wait for the command to take the next."""
        if self._at is not None:
            self._tell(**self._measured())
        if json.loads(sys.stdin.readline() or "null") != "step":
            os._exit(0)  # in the middle of a library's loop, maybe with threads of its own
        self.phases = {}
        self._forget_programs()
        forget_peak()
        self._at = _clocks()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to a phase of the step."""
        start = time.perf_counter()
        yield
        self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - start

    def phased(self, name: str, function: Callable[..., Any], wait: Callable[[Any], Any] = lambda x: x) -> Any:
        """Return `function`, timed as that phase; `wait` blocks until its result is ready."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return wait(function(*args, **kwargs))

        return timed

    def listen(self, monitoring: Any) -> None:
        """Count programs from here on, as `jax.monitoring` reports them."""
        monitoring.register_event_duration_secs_listener(self._heard)
        monitoring.register_event_listener(self._loaded)

    def _heard(self, event: str, seconds: float, **_: Any) -> None:
        if event in COMPILING:
            self.compile_seconds += seconds
            self.compiled += event == COMPILING[-1]

    def _loaded(self, event: str, **_: Any) -> None:
        self.from_cache += event == LOADED

    def _forget_programs(self) -> None:
        self.compiled, self.from_cache, self.compile_seconds = 0, 0, 0.0

    def _programs(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("compiled", "from_cache", "compile_seconds")}

    def _measured(self) -> dict[str, Any]:
        assert self._at is not None
        now = _clocks()
        spent = {name: now[name] - self._at[name] for name in now}
        return {
            "seconds": spent["wall"],
            "phases": self.phases,
            **self._programs(),
            "lengths": list(map(int, self.lengths)),
            "peak_gib": peak_gib(),
            "cores": spent["own"] / spent["wall"],
            "others": max(spent["machine"] - spent["own"], 0.0) / spent["wall"],
        }

    def _tell(self, **facts: Any) -> None:
        print(json.dumps(facts), file=self._replies, flush=True)


def _clocks() -> dict[str, float]:
    """Return seconds of wall time, of this process on all cores, and of the whole machine (where known)."""
    stat = Path("/proc/stat")
    times = [int(n) for n in stat.read_text().split("\n", 1)[0].split()[1:9]] if stat.is_file() else [0] * 8
    busy = (sum(times) - times[3] - times[4]) / os.sysconf("SC_CLK_TCK")
    return {"wall": time.perf_counter(), "own": time.process_time(), "machine": busy}


def peak_gib() -> float:
    """Return the peak resident memory since `forget_peak`; NaN where the system does not report it."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return round(int(line.split()[1]) / 2**20, 3)
    return float("nan")


def forget_peak() -> None:
    """Restart the count of the peak, so that each step has its own."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
