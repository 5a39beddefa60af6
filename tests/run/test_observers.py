"""Programs that a run compiled are counted; its reports and its diagnosis cost little and end nothing."""

import json
import logging
import shutil
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from covey.config import recipe
from covey.display import show_log
from covey.run import observers
from covey.run.folder import describe_environment
from covey.run.observers import (
    COMPILED_EVENT,
    INTERVAL,
    LONG,
    LOOK_BACK,
    LOWERED_EVENT,
    MAX_SHARE,
    TRACED_EVENT,
    WARM_UP_STEPS,
    CompileCounter,
    FindingsLog,
    ReportWriter,
)

STEPS = 12
RECIPE = recipe.load("quickstart")


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
    monkeypatch.setattr(observers, "release_free_memory", lambda: released.append(True))
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
        assert programs.step(1) > 0
        assert programs.step(2) == 0
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
        programs.step(1)
        compiled_anew(20)
    assert began[6:] == [1, 0]
    assert names == {"", "<lambda>"}


def test_the_same_shape_again_compiles_nothing() -> None:
    double = jax.jit(lambda x: 2 * x)
    double(jnp.ones(3))
    with CompileCounter() as programs:
        double(jnp.ones(3))
        assert programs.step(1) == 0
    assert not programs.counts


def test_seconds_of_a_step_are_those_of_its_phases_each_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The traps: all of a first evaluation in the first step, tracing left out, and a function traced within another
    counted twice.
    """
    now = 0.0
    monkeypatch.setattr(observers.time, "perf_counter", lambda: now)
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
        assert programs.step(1) == 5 + 2 + 7
        assert programs.step(2) == 0


def test_a_run_that_keeps_compiling_is_told_once_what_to_change(heard: list[str]) -> None:
    with CompileCounter() as programs:
        programs.phase("logps")
        for step in range(1, WARM_UP_STEPS + 2 * LOOK_BACK):
            jax.monitoring.record_event_duration_secs(COMPILED_EVENT, 0.1)
            programs.step(step)
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
            programs.step(step)
    assert not heard


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml(RECIPE))
    return SimpleNamespace(path=tmp_path, path_as_given=Path("runs/a"), writes=True, resuming=False)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that moves when `now` is set; a report takes `cost` seconds on it."""
    clock = SimpleNamespace(now=0.0, cost=0.0, written=[])
    monkeypatch.setattr(observers.time, "monotonic", lambda: clock.now)

    def write(out: Path, folders: list[Path], status: str) -> None:
        clock.written.append(clock.now)
        clock.now += clock.cost

    monkeypatch.setattr(observers, "write_report", write)
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


def rows(count: int = STEPS, **values: float) -> list[dict[str, Any]]:
    same = {"reward": 0.3, "reward_std": 0.0, "reward_error": 0.0, "frac_reward_zero_std": 1.0, "learning_rate": 1e-5}
    return [{"step": number, **same, **values} for number in range(1, count + 1)]


def said(folder: Any, steps: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Messages and warnings of a run with these rows."""
    messages: list[str] = []
    warnings: list[str] = []
    with show_log(messages.append, warnings.append):
        log = FindingsLog(RECIPE, folder, {"before": {"accuracy": 0.1, "pass@k": None}})
        with (folder.path / "metrics.jsonl").open("a") as file:
            for row in steps:
                file.write(json.dumps(row) + "\n")
                log.step(row)
        log.end()
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


def test_a_diagnosis_that_fails_ends_no_run(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(observers.LiveDiagnosis, "step", fail)
    messages, (warning,) = said(folder, rows())
    assert warning == "the diagnosis failed: ValueError: broken; the run goes on without it"
    assert messages == []
