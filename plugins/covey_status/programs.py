"""Count the programs that a run compiles."""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax

from covey.monitor.progress import Progress
from covey.monitor.record import StepRecord
from covey.run.outputs import Watcher
from covey.train.allocator import release_free_memory

log = logging.getLogger(f"covey.{__name__}")  # as part of Covey, whose log a run shows

TRACED_EVENT = "/jax/core/compile/jaxpr_trace_duration"
LOWERED_EVENT = "/jax/core/compile/jaxpr_to_mlir_module_duration"
COMPILED_EVENT = "/jax/core/compile/backend_compile_duration"
STEP_PHASES = ("rollout", "reward", "logps", "update", "sync")
"""Phases whose seconds are part of the time of a step."""
PHASES = (*STEP_PHASES, "save", "evaluate")
OUTSIDE_STEPS = "beside"
"""Name for everything outside a step: loading, and the evaluations before and after."""
WARM_UP_STEPS, LOOK_BACK = 20, 10
"""Number of first steps in which new shapes are expected, and number of later steps that are then examined."""
LONG = 1.0
"""Seconds of a compilation that leaves enough free memory to return it to the system, before the program runs."""


def count(recipe: object, folder: object, progress: Progress) -> "CompileCounter":
    """Return the counter of a run, which shows the program that is being compiled."""
    return CompileCounter(progress.compiling)


class CompileCounter(Watcher):
    """Count programs between enter and exit, from JAX's own events. A phase belongs to the thread that begins it: one
    may sample while another trains. After a long compilation, return the compiler's memory to the system.

    Each new shape costs one more program: seconds on a large model. Shapes come in few sizes by design, so that after
    some steps nothing is compiled any more. A run reports how many programs each of its phases compiled, and warns when
    compilation does not stop. A program from the cache on disk counts too: it takes up memory although not compiled.

    Args:
        on_compile: called when the compilation of a program begins, with its number in the step and phase and the name
            of its function, and with 0 and no name when it ends.

    Attributes:
        counts: number of programs by phase.
    """

    def __init__(self, on_compile: Callable[[int, str], None] = lambda number, name: None) -> None:
        self._on_compile = on_compile
        self.counts: Counter[str] = Counter()
        self._steps, self._warned = 0, False
        self._thread = threading.local()
        self._seconds, self._new = 0.0, Counter[str]()
        self._last: deque[Counter[str]] = deque(maxlen=LOOK_BACK)

    def phase(self, name: str) -> None:
        """Begin the phase `name` in this thread."""
        self._thread.phase = name if name in PHASES else OUTSIDE_STEPS

    def step(self, record: StepRecord) -> None:
        """Add `time/compile` to the metrics of a step."""
        record.metrics["time/compile"] = self.seconds_of_step(record.step)

    def summary(self) -> Mapping[str, Any]:
        """Return the number of programs by phase."""
        return {"programs": dict(self.counts)}

    def seconds_of_step(self, number: int) -> float:
        """Return the seconds of compilation in the phases of the step; warn once if most of the last steps still
        compiled. Tracing and lowering are part of them, and what was compiled before the step is not.
        """
        seconds, new = self._seconds, self._new
        self._seconds, self._new = 0.0, Counter()
        self._last.append(new)
        self._steps += 1
        compiling = sum(bool(programs) for programs in self._last)
        if self._steps >= WARM_UP_STEPS + LOOK_BACK and compiling > LOOK_BACK / 2 and not self._warned:
            self._warned = True
            counts = sum(self._last, Counter[str]())
            by_phase = ", ".join(f"{phase} {count}" for phase, count in counts.most_common())
            log.warning(
                f"step {number}: {compiling} of the last {LOOK_BACK} steps compiled new programs ({by_phase}): {ADVICE}"
            )
        return seconds

    def __enter__(self) -> Self:
        jax.monitoring.register_event_duration_secs_listener(self._on_event)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **details: str | int) -> None:
        phase = getattr(self._thread, "phase", OUTSIDE_STEPS)
        if event in (TRACED_EVENT, LOWERED_EVENT, COMPILED_EVENT):
            self._seconds += self._own_seconds(duration_secs) * (phase in STEP_PHASES)
        if event == LOWERED_EVENT:
            name = str(details.get("fun_name", "")).removeprefix("jit(").removesuffix(")").strip("_")
            self._on_compile(self._new[phase] + 1, name)
        elif event == COMPILED_EVENT:
            self._on_compile(0, "")
            self.counts[phase] += 1
            self._new[phase] += 1
            if duration_secs > LONG:
                release_free_memory()

    def _own_seconds(self, seconds: float) -> float:
        """Return the seconds of an event that ends now, without those of the events of this thread within it."""
        spans: list[tuple[float, float]] = self._thread.__dict__.setdefault("spans", [])
        start, inner = time.perf_counter() - seconds, 0.0
        while spans and spans[-1][0] >= start:
            inner += spans.pop()[1]
        spans.append((start, seconds))
        return seconds - inner


ADVICE = (
    "lengths keep falling into new shapes. Fewer of them: a larger rollout.decode_chunk, fewer rollout.slots, more "
    "training.max_tokens_per_micro_batch, or limits on lengths that fit the data"
)
