"""Programs that a run compiled are counted."""

import threading
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

from covey.display import show_log
from covey_status import programs as programs_module
from covey_status.programs import (
    COMPILED_EVENT,
    LONG,
    LOOK_BACK,
    LOWERED_EVENT,
    TRACED_EVENT,
    WARM_UP_STEPS,
    CompileCounter,
)


def compiled_anew(size: int) -> None:
    """Runs a program that exists for no other size."""
    jax.block_until_ready(jax.jit(lambda x: jnp.sin(x) + size)(jnp.zeros(())))


@pytest.fixture
def heard() -> Iterator[list[str]]:
    """The warnings of the package."""
    found: list[str] = []
    with show_log(info=print, warning=found.append):
        yield found


def test_the_memory_of_a_long_compilation_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[bool] = []
    monkeypatch.setattr(programs_module, "release_free_memory", lambda: released.append(True))
    with CompileCounter():
        for seconds in (LONG / 2, LONG * 2):
            jax.monitoring.record_event_duration_secs(COMPILED_EVENT, seconds)
    assert released == [True]


def test_programs_are_counted_in_the_phase_that_compiled_them(heard: list[str]) -> None:
    with CompileCounter() as programs:
        compiled_anew(1)
        programs.phase("rollout")
        compiled_anew(2)
        compiled_anew(3)
        programs.phase("evaluating before training")
        compiled_anew(4)
        assert programs.seconds_of_step(1) > 0
        assert programs.seconds_of_step(2) == 0
    compiled_anew(5)  # nobody listens any more
    assert programs.counts["rollout"] == 2
    assert programs.counts["beside"] >= 2  # the zeros too, the first time
    assert not heard


def test_a_thread_has_a_phase_of_its_own(heard: list[str]) -> None:
    def samples() -> None:
        programs.phase("rollout")
        began.set()
        over.wait()

    began, over = threading.Event(), threading.Event()
    with CompileCounter() as programs:
        programs.phase("update")
        thread = threading.Thread(target=samples)
        thread.start()
        began.wait()
        compiled_anew(6)
        over.set()
        thread.join()
    assert set(programs.counts) == {"update"}


def test_the_programs_of_a_step_are_named_and_numbered_as_they_begin() -> None:
    began: list[int] = []
    names: set[str] = set()

    def listen(number: int, name: str) -> None:
        began.append(number)
        names.add(name)

    compiled_anew(7)  # the zeros too, the first time
    with CompileCounter(listen) as programs:
        for phase in ("rollout", "update", "rollout"):
            programs.phase(phase)
            compiled_anew(8 + len(began))
        assert began == [1, 0, 1, 0, 2, 0]
        programs.seconds_of_step(1)
        compiled_anew(20)
    assert began[6:] == [1, 0]
    assert names == {"", "<lambda>"}


def test_the_same_shape_again_compiles_nothing() -> None:
    double = jax.jit(lambda x: 2 * x)
    double(jnp.ones(3))
    with CompileCounter() as programs:
        double(jnp.ones(3))
        assert programs.seconds_of_step(1) == 0
    assert not programs.counts


def test_seconds_of_a_step_are_those_of_its_phases_each_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The traps: all of a first evaluation in the first step, tracing left out, and a function traced within another
    counted twice.
    """
    now = 0.0
    monkeypatch.setattr(programs_module.time, "perf_counter", lambda: now)
    with CompileCounter() as programs:
        for phase, event, end, seconds in (
            ("evaluating before training", COMPILED_EVENT, 30.0, 30.0),
            ("update", TRACED_EVENT, 33.0, 1.0),
            ("update", TRACED_EVENT, 35.0, 1.0),
            ("update", TRACED_EVENT, 36.0, 5.0),  # it began at 31, before both
            ("update", LOWERED_EVENT, 38.0, 2.0),
            ("update", COMPILED_EVENT, 45.0, 7.0),
            ("save", COMPILED_EVENT, 47.0, 2.0),
        ):
            programs.phase(phase)
            now = end
            jax.monitoring.record_event_duration_secs(event, seconds)
        assert programs.seconds_of_step(1) == 5 + 2 + 7
        assert programs.seconds_of_step(2) == 0


def test_a_run_that_keeps_compiling_is_told_once_what_to_change(heard: list[str]) -> None:
    with CompileCounter() as programs:
        programs.phase("logps")
        for step in range(1, WARM_UP_STEPS + 2 * LOOK_BACK):
            jax.monitoring.record_event_duration_secs(COMPILED_EVENT, 0.1)
            programs.seconds_of_step(step)
            assert bool(heard) == (step >= WARM_UP_STEPS + LOOK_BACK)
    assert len(heard) == 1
    assert f"{LOOK_BACK} of the last {LOOK_BACK} steps" in heard[0]
    assert "logps 10" in heard[0]
    assert "training.max_tokens_per_micro_batch" in heard[0]


def test_a_run_that_compiles_now_and_then_is_left_in_peace(heard: list[str]) -> None:
    with CompileCounter() as programs:
        for step in range(1, WARM_UP_STEPS + 3 * LOOK_BACK):
            if step < WARM_UP_STEPS or step % 3 == 0:
                jax.monitoring.record_event_duration_secs(COMPILED_EVENT, 0.1)
            programs.seconds_of_step(step)
    assert not heard
