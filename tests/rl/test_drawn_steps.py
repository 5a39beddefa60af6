"""The threads that sample and score steps ahead, driven by a draw without a model."""

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from covey.config.schema import EnvsConfig
from covey.errors import EpisodeError
from covey.parallel import channel
from covey.rewards import RewardRunner
from covey.rl.drawn_steps import Draw, Drawing, DrawnStep, Finish, RolloutThreads
from covey.rl.experience import RolloutBatch
from covey.rl.step_stats import FailureCounts

LIMIT = 10.0
"""Seconds after which a wait that should end has failed."""
STEPS, LEAD = 6, 2


class Failing:
    """Draw of a run whose step s has s + 1 failures of an environment. A step is scored when the next one that the
    same weights or earlier ones may draw is sampled, and replaces what it sampled.
    """

    def __init__(self) -> None:
        config = EnvsConfig(environment="guess", on_error="none", budget=1000)
        runner = pytest.importorskip("covey_envs.runner").EnvironmentRunner
        self.environments, self.weights, self.ahead = runner("guess", config), -1, list[bool]()
        self.counts = FailureCounts(RewardRunner(), self.environments)
        self.used = list[tuple[int, int, int]]()
        self._sampled = [threading.Event() for _ in range(STEPS + 1)]
        self._sampled[STEPS].set()

    def __call__(self, step: int, version: int, drawing: Drawing) -> Finish | None:
        with drawing():
            failed = self.sample(step, version)
        self._sampled[step].set()

        def finish() -> DrawnStep:
            if step % (LEAD + 1) < LEAD:
                self.ahead.append(self._sampled[step + 1].wait(LIMIT))
            with drawing():
                more = self.sample(step, version)
            _, of_environments = self.counts.agree(failed + more)
            return DrawnStep(version, RolloutBatch([]), {}, of_environments)

        return finish

    def sample(self, step: int, version: int) -> int:
        self.used.append((step, version, self.weights))
        for _ in range(step + 1):
            self.environments.accept(EpisodeError("fails"))
        return self.counts.take_sampled()

    def set_weights(self, weights: int) -> None:
        self.weights = weights


@contextmanager
def running(draw: Draw, set_weights: Callable[[int], None] = lambda weights: None) -> Iterator[RolloutThreads]:
    updates = iter(range(STEPS + 1))
    threads = RolloutThreads(draw, LEAD, range(STEPS), copy_weights=lambda: next(updates), set_weights=set_weights)
    try:
        with threads.running():
            yield threads
    finally:
        assert not [thread for thread in threading.enumerate() if thread.name in ("covey-sampler", "covey-scorer")]


def taken(threads: RolloutThreads, count: int) -> list[DrawnStep | None]:
    found = []
    for step in range(count):
        threads.offer(step)
        found.append(threads.take())
    return found


def test_the_next_steps_are_sampled_while_a_step_is_scored() -> None:
    """And each sample, also one that replaces others then, takes the weights of its step."""
    draw = Failing()
    with running(draw, draw.set_weights) as threads:
        drawn = taken(threads, STEPS)
    assert set(draw.ahead) == {True}
    versions = [max(step - LEAD, 0) for step in range(STEPS)]
    assert [step and step.version for step in drawn] == versions
    assert sorted(draw.used) == sorted(2 * [(step, version, version) for step, version in enumerate(versions)])


def test_the_failures_of_a_step_are_those_of_the_steps_up_to_it() -> None:
    """Although the environments have failed in later ones by then."""
    draw = Failing()
    with running(draw, draw.set_weights) as threads:
        drawn = taken(threads, STEPS)
    assert [step and step.env_failed for step in drawn] == [(step + 1) * (step + 2) for step in range(STEPS)]


@pytest.mark.parametrize("early", [False, True], ids=["the sampler is late", "the sampler is early"])
def test_the_step_beyond_the_budget_ends_the_run_whichever_thread_is_ahead(
    early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two processes has failed 5 times in step 0, and this one once in step 1: 11 of 10."""
    config = EnvsConfig(environment="guess", on_error="none", budget=10)
    environments = pytest.importorskip("covey_envs.runner").EnvironmentRunner("guess", config)
    counts, elsewhere = FailureCounts(RewardRunner(), environments), iter([5, 0, 0])
    monkeypatch.setattr(channel, "all_gather", lambda own, about: [own, ({}, next(elsewhere))])
    sampled, scored = threading.Event(), threading.Event()

    def draw(step: int, version: int, drawing: Drawing) -> Finish:
        if step == 1 and not early:
            scored.wait(LIMIT)
        for _ in range((5, 1, 0)[step]):
            environments.accept(EpisodeError("fails"))
        failed = counts.take_sampled()
        if step == 1:
            sampled.set()

        def finish() -> DrawnStep:
            if early:
                sampled.wait(LIMIT)
            _, of_environments = counts.agree(failed)
            scored.set()
            return DrawnStep(version, RolloutBatch([]), {}, of_environments)

        return finish

    threads = RolloutThreads(draw, 1, range(3), copy_weights=lambda: None, set_weights=lambda weights: None)
    with threads.running():
        assert [step and step.env_failed for step in taken(threads, 1)] == [10]
        with pytest.raises(EpisodeError, match="11 failures of the environment 'guess'"):
            threads.take()


class FailedError(Exception):
    """Stands for an error of a sampler or of a reward function."""


def fail_at(step: int, version: int) -> DrawnStep:
    if step == 1:
        raise FailedError
    return DrawnStep(version, RolloutBatch([]))


def while_sampling(step: int, version: int, drawing: Drawing) -> Finish:
    drawn = fail_at(step, version)
    return lambda: drawn


def while_scoring(step: int, version: int, drawing: Drawing) -> Finish:
    return lambda: fail_at(step, version)


@pytest.mark.parametrize("draw", [while_sampling, while_scoring])
def test_an_error_comes_to_the_trainer_at_its_step_and_ends_both_threads(draw: Draw) -> None:
    with running(draw) as threads:
        taken(threads, 1)
        with pytest.raises(FailedError) as caught:
            threads.take()
    assert caught.traceback[-1].name == "fail_at"


class Weights:
    """Stands for a copy of the weights."""


def test_no_more_copies_of_the_weights_live_than_steps_that_wait_for_theirs() -> None:
    """Those of a step that was scored are gone while the next one is sampled."""
    alive, held, end = weakref.WeakSet[Weights](), list[Any](), threading.Event()

    def copy() -> Weights:
        alive.add(weights := Weights())
        return weights

    def draw(step: int, version: int, drawing: Drawing) -> Finish:
        with drawing():
            end.wait(2 * LIMIT if step > LEAD else 0)
        return lambda: (drawing, DrawnStep(version, RolloutBatch([])))[1]

    def set_weights(weights: Weights) -> None:
        held[:] = [weights]

    threads = RolloutThreads(draw, LEAD, range(STEPS), copy_weights=copy, set_weights=set_weights)
    with threads.running():
        taken(threads, LEAD + 1)
        begin = time.monotonic()
        threads.offer(LEAD + 1)
        while len(alive) > LEAD + 1 and time.monotonic() - begin < LIMIT:
            time.sleep(0.01)
        found = len(alive)
        end.set()
    assert found == LEAD + 1


def test_the_sampler_ends_where_the_scorer_cannot_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "covey-scorer":
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start"), running(while_scoring):
        pass
