"""Rollouts ahead of training, driven by a learner without a model: which weights sample which step, and how the threads
that sample and score them end.
"""

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from covey.data.loader import PromptLoader
from covey.errors import EpisodeError
from covey.parallel import processes
from covey.parallel.values import deserialize, serialize
from covey.rewards.scoring import RewardRunner
from covey.rl.metrics import StepStats
from covey.rl.rollouts import (
    FORMER_CLASSES,
    FailureCounts,
    Rollouts,
    SampledStep,
    SamplingContext,
    Worker,
    _renamed,
    load_steps,
)
from covey.rl.stage_sizes import StageSizes
from covey.rl.step_data import PromptBatch, RolloutBatch
from covey.types import Group

LIMIT = 10.0
"""Seconds after which a wait that should end has failed."""
STEPS, LEAD = 6, 2


class Environments:
    """Counts failures of environments, as a `ResponderFactory` does, with a budget for all processes."""

    def __init__(self, budget: int = 1000):
        self.failed, self._budget = 0, budget

    def fail(self, times: int) -> None:
        self.failed += times

    def count_elsewhere(self, failures: int, total: int) -> None:
        self.failed += failures
        if total > self._budget:
            raise EpisodeError(f"{total} failures of the environment")


class Played:
    """A learner of `STEPS` steps without a model. `weights` are those that the rollout has: the number of updates."""

    def __init__(self, lead: int = LEAD, threaded: bool = True, environments: Any = None, parts: int = 1):
        self.training, self.step = SimpleNamespace(off_policy_steps=lead), 0
        self.sampled, self.rollouts = list[SampledStep](), None
        self.algorithm = SimpleNamespace(max_sampling_rounds=1, needs_whole_step=False)
        self.config, self.sizes = SimpleNamespace(num_iterations=1), StageSizes(1, 1, 1, 1)
        self.stats, self.failures = StepStats(), FailureCounts(RewardRunner(), environments)
        self.loader = PromptLoader([{"prompt": str(n)} for n in range(100)], parts, shuffle=False)
        self.weights: Any = 0
        self.updates = 0
        self.cluster = SimpleNamespace(
            config=SimpleNamespace(runs_ahead=threaded),
            rollout=SimpleNamespace(update_params=self.set_weights),
            copy_weights=self.copy_weights,
            sync_weights=lambda: self.set_weights(self.updates),
        )

    def on_phase(self, name: str) -> None: ...

    def phase(self, name: str) -> Any:
        return nullcontext()

    def copy_weights(self) -> Any:
        return self.updates

    def set_weights(self, weights: Any) -> None:
        self.weights = weights

    def sample(self, prompts: PromptBatch) -> RolloutBatch:
        return RolloutBatch([])

    def score(self, rollout: RolloutBatch) -> RolloutBatch:
        return rollout

    def replace_tied(self, rollout: RolloutBatch, prompts: PromptBatch, context: SamplingContext) -> RolloutBatch:
        return rollout

    @contextmanager
    def running(self) -> Iterator[Rollouts]:
        try:
            with Rollouts(self, self.loader, STEPS).running() as rollouts:  # type: ignore[arg-type]
                yield rollouts
        finally:
            assert not threads()

    def train(self, rollouts: Rollouts, count: int = 1) -> list[int]:
        """Take steps, and update the weights after each; return the numbers of the weights that sampled them."""
        versions = []
        for _ in range(count):
            assert list(rollouts.of_step(self.step)) or not self.training.off_policy_steps
            versions.append(self.stats.version)
            self.updates += 1
            rollouts.new_weights()
            self.step += 1
        return versions


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("covey-")]


class Failing(Played):
    """Step s has 2s + 2 failures of an environment. A step is scored when the next one that the same weights or earlier
    ones may sample is sampled, and replaces what it sampled.
    """

    def __init__(self) -> None:
        self.environments = Environments()
        super().__init__(environments=self.environments)
        self.next_was_sampled, self.used = list[bool](), list[tuple[int, Any]]()
        self._sampled = [threading.Event() for _ in range(STEPS + 1)]
        self._sampled[STEPS].set()

    def sample(self, prompts: PromptBatch) -> RolloutBatch:
        self.used.append((prompts.step, self.weights))
        self.environments.fail(prompts.step + 1)
        self._sampled[prompts.step].set()
        return RolloutBatch([], env_failed=self.failures.take_sampled())

    def replace_tied(self, rollout: RolloutBatch, prompts: PromptBatch, context: SamplingContext) -> RolloutBatch:
        if prompts.step % (LEAD + 1) < LEAD:
            self.next_was_sampled.append(self._sampled[prompts.step + 1].wait(LIMIT))
        with context():
            return rollout.joined(self.sample(prompts))


def test_the_next_steps_are_sampled_while_a_step_is_scored() -> None:
    """And each sample, also one that replaces others then, takes the weights of its step."""
    learner = Failing()
    with learner.running() as rollouts:
        versions = learner.train(rollouts, STEPS)
    assert set(learner.next_was_sampled) == {True}
    assert versions == [max(step - LEAD, 0) for step in range(STEPS)]
    assert sorted(learner.used) == sorted(2 * list(enumerate(versions)))
    assert learner.weights == STEPS, "after the last step the rollout has the last weights"


def test_the_failures_of_a_step_are_those_of_the_steps_up_to_it() -> None:
    """Although the environments have failed in later ones by then."""
    learner, failed = Failing(), []
    with learner.running() as rollouts:
        for _ in range(STEPS - 1):
            learner.train(rollouts)
            failed.append([ahead.env_failed for ahead in rollouts.unused_steps()])
    all_failed = [(step + 1) * (step + 2) for step in range(STEPS)]
    assert failed == [all_failed[step : step + LEAD] for step in range(1, STEPS)]


class Seen(Played):
    """Notes the prompts of each part, and the weights that sample it."""

    def __init__(self, *args: Any, **keywords: Any):
        super().__init__(*args, **keywords)
        self.seen = list[tuple[int, Any, list[str]]]()

    def sample(self, prompts: PromptBatch) -> RolloutBatch:
        self.seen.append((prompts.step, self.weights, [row["prompt"] for row in prompts.examples]))
        return super().sample(prompts)


@pytest.mark.parametrize("lead", [0, 1, 2])
def test_threads_and_turns_sample_the_same_prompts_with_the_same_weights(lead: int) -> None:
    """And the data are as far as the steps that were trained, however many are ahead."""
    seen, positions = [], []
    for threaded in (False, True):
        learner = Seen(lead, threaded, parts=2)
        with learner.running() as rollouts:
            for _ in range(STEPS):
                learner.train(rollouts)
                positions.append(learner.loader.position)
            assert rollouts.of_step(STEPS) == ()
        seen.append(learner.seen)
    assert seen[0] == seen[1]
    assert positions == 2 * [2 * step for step in range(1, STEPS + 1)]
    assert [(step, weights) for step, weights, _ in seen[0][:: 1 if lead else 2]] == [
        (step, max(step - lead, 0)) for step in range(STEPS)
    ]


def test_the_parts_of_a_step_are_sampled_while_the_first_is_trained_and_no_further() -> None:
    learner = Seen(0, parts=3)
    with learner.running() as rollouts:
        parts = iter(rollouts.of_step(0))
        next(parts)
        begin = time.monotonic()
        while len(learner.seen) < 3 and time.monotonic() - begin < LIMIT:
            time.sleep(0.01)
        assert [step for step, _, _ in learner.seen] == [0, 0, 0]
        assert len(list(parts)) == 2


def test_steps_of_a_checkpoint_are_not_sampled_again() -> None:
    first, second = Seen(), Seen()
    with first.running() as rollouts:
        first.train(rollouts, 2)
        second.sampled, second.step, second.updates = rollouts.unused_steps(), 2, 2
        second.loader.take(2)
    with second.running() as rollouts:
        assert second.train(rollouts, 4) == [0, 1, 2, 3]
    assert [step for step, _, _ in second.seen] == [4, 5]


def with_header(data: bytes, change: Callable[[bytes], bytes]) -> bytes:
    start = 8 + int.from_bytes(data[:8], "little")
    text = change(data[8:start])
    return len(text).to_bytes(8, "little") + text + data[start:]


def test_a_checkpoint_of_an_earlier_version_names_its_steps_otherwise() -> None:
    def former(text: bytes) -> bytes:
        for old, (name, fields) in FORMER_CLASSES.items():
            assert text.count(name.encode()) == 1
            text = text.replace(name.encode(), b"covey.rl.former:%s" % old.encode())
            for old_field, field in fields.items():
                assert text.count(b'["%s", ' % field.encode()) == 1
                text = text.replace(b'["%s", ' % field.encode(), b'["%s", ' % old_field.encode())
        return text

    data = serialize([SampledStep(3, RolloutBatch([]), {"judge": 2}, 1)])
    (step,) = load_steps([with_header(data, former)])
    assert (step.version, step.failed, step.env_failed) == (3, {"judge": 2}, 1)


def test_names_of_rewards_and_columns_are_not_those_of_fields() -> None:
    """`cut` and `mass` were fields of a class; functions, columns and texts of data keep such names."""
    columns = {"mass": 3.0, "cut": "a", "tags": ["cut", "mass", 1], "class": "covey.rl.group_table:GroupTable"}
    group = Group('["cut", ', np.array([1]), (), columns)
    data = serialize([SampledStep(3, RolloutBatch([group]), {"mass": 2, "cut": 1}, 1)])
    (step,) = deserialize(data, _renamed)
    assert step.failed == {"mass": 2, "cut": 1}
    assert (step.rollout.groups[0].prompt, step.rollout.groups[0].columns) == ('["cut", ', columns)


@pytest.mark.parametrize("early", [False, True], ids=["the sampler is late", "the sampler is early"])
def test_the_step_beyond_the_budget_ends_the_run_whichever_thread_is_ahead(
    early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two processes has failed 5 times in step 0, and this one once in step 1: 11 of 10."""
    environments = Environments(budget=10)
    elsewhere = iter([5, 0, 0])
    monkeypatch.setattr(processes.ALONE, "all_gather", lambda own, about: [own, ({}, next(elsewhere))])
    sampled, scored = threading.Event(), threading.Event()

    class Late(Played):
        def sample(self, prompts: PromptBatch) -> RolloutBatch:
            if prompts.step == 1 and not early:
                scored.wait(LIMIT)
            environments.fail((5, 1, 0)[prompts.step])
            failed = self.failures.take_sampled()
            if prompts.step == 1:
                sampled.set()
            return RolloutBatch([], env_failed=failed)

        def score(self, rollout: RolloutBatch) -> RolloutBatch:
            if early:
                sampled.wait(LIMIT)
            threading.Timer(0.1, scored.set).start()  # once its failures are counted
            return rollout

    learner = Late(1, environments=environments)
    with pytest.raises(EpisodeError, match="11 failures of the environment"), learner.running() as rollouts:
        learner.train(rollouts, 2)
    assert learner.step == 1


class FailedError(Exception):
    """Stands for an error of a sampler or of a reward function."""


def fail_at(step: int) -> None:
    if step == 1:
        raise FailedError


class FailsToSample(Played):
    def sample(self, prompts: PromptBatch) -> RolloutBatch:
        fail_at(prompts.step)
        return super().sample(prompts)


class FailsToScore(Played):
    def replace_tied(self, rollout: RolloutBatch, prompts: PromptBatch, context: SamplingContext) -> RolloutBatch:
        fail_at(prompts.step)
        return rollout


@pytest.mark.parametrize("kind", [FailsToSample, FailsToScore])
@pytest.mark.parametrize("lead", [0, LEAD])
def test_an_error_comes_to_the_trainer_at_its_step_and_ends_both_threads(kind: type[Played], lead: int) -> None:
    learner = kind(lead)
    with pytest.raises(FailedError) as caught, learner.running() as rollouts:
        learner.train(rollouts, 2)
    assert learner.step == 1
    assert caught.traceback[-1].name == "fail_at"


class Weights:
    """Stands for a copy of the weights."""


def test_no_more_copies_of_the_weights_live_than_steps_that_wait_for_theirs() -> None:
    """Those of a step that was scored are gone while the next one is sampled."""
    alive, end = weakref.WeakSet[Weights](), threading.Event()

    class Copies(Played):
        def copy_weights(self) -> Weights:
            alive.add(weights := Weights())
            return weights

        def sample(self, prompts: PromptBatch) -> RolloutBatch:
            end.wait(2 * LIMIT if prompts.step > LEAD else 0)
            return RolloutBatch([])

    learner = Copies()
    with learner.running() as rollouts:
        learner.train(rollouts, LEAD + 1)
        taken = threading.Thread(target=learner.train, args=(rollouts,))
        taken.start()
        begin = time.monotonic()
        while len(alive) > LEAD + 1 and time.monotonic() - begin < LIMIT:
            time.sleep(0.01)
        found = len(alive)
        end.set()
        taken.join()
    assert found == LEAD + 1


def test_the_sampler_ends_where_the_scorer_cannot_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "covey-scorer":
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start"), Played().running():
        pass


# The worker


@contextmanager
def worker() -> Iterator[Worker]:
    try:
        with Worker("sampler", "wait") as thread:
            yield thread
    finally:
        assert not threads()


def submitted(thread: Worker, call: Callable[[], Any]) -> Future[Any]:
    future = Future[Any]()
    thread.submit(future, lambda waited: future.set_result(call()))
    return future


def fails(error: BaseException) -> None:
    raise error


def test_calls_are_made_in_their_order_in_one_thread() -> None:
    calls = list[tuple[int, str]]()
    with worker() as thread:
        futures = [submitted(thread, lambda n=n: calls.append((n, threading.current_thread().name))) for n in range(20)]
        futures[-1].result(LIMIT)
    assert calls == [(n, "covey-sampler") for n in range(20)]


@pytest.mark.parametrize("kind", [FailedError, KeyboardInterrupt, SystemExit, MemoryError])
def test_an_error_is_raised_where_its_result_is_read_and_ends_the_calls(kind: type[BaseException]) -> None:
    futures: list[Future[Any]] = []

    def read_all() -> None:
        with worker() as thread:
            futures.extend(submitted(thread, call) for call in (int, lambda: fails(kind("why")), int))
            assert futures[0].result(LIMIT) == 0
            futures[1].result(LIMIT)

    with pytest.raises(kind) as caught:
        read_all()
    assert caught.traceback[-1].name == "fails"
    assert not futures[2].done()


def test_an_error_that_nobody_read_is_raised_in_the_end() -> None:
    with pytest.raises(FailedError, match="why"), worker() as thread:
        submitted(thread, lambda: fails(FailedError("why"))).exception(LIMIT)


def test_when_both_fail_the_readers_error_goes_on_with_a_note() -> None:
    def fail_too() -> None:
        with worker() as thread:
            submitted(thread, lambda: fails(FailedError("why"))).exception(LIMIT)
            1 / 0  # noqa: B018

    with pytest.raises(ZeroDivisionError) as caught:
        fail_too()
    assert caught.value.__notes__ == ["the sampler had failed too: FailedError('why')"]


@pytest.mark.parametrize("leave", [None, FailedError, KeyboardInterrupt])
def test_leaving_midway_waits_for_the_call_in_progress_and_drops_the_rest(leave: type[BaseException] | None) -> None:
    began, made = threading.Event(), list[int]()

    def call() -> None:
        began.set()
        time.sleep(0.1)
        made.append(1)

    with nullcontext() if leave is None else pytest.raises(leave), worker() as thread:
        submitted(thread, call)
        submitted(thread, lambda: made.append(2))
        began.wait(LIMIT)
        if leave is not None:
            raise leave
    assert made == [1]
