"""Rollouts of the steps, in order. With k = `training.off_policy_steps`, steps counted from 0, and one update in each,

    weights after this number of updates    0              1      2      3
    sample the steps                        0, 1 … k       k+1    k+2    k+3
    and are trained at step                 0              1      2      3

So step s trains on samples of the weights after max(s − k, 0) updates. Which weights sample which step, and the order
of the steps, follow from these numbers alone, never from the clock: two threads that sample and score while another
one trains give the same samples as a run that takes turns, and training waits for a late rollout.

Threads run where sampling disturbs no training (`ClusterConfig.runs_ahead`). With k = 0 they prepare the next parts of
the step that is trained; with k > 0 the next steps. One thread samples and one scores: while reward functions wait,
the next prompts are sampled. In several processes each has two such threads, which launch programs of its own process
alone. Those that score meet where they exchange rewards, in the order of the steps.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import islice
from queue import SimpleQueue
from threading import Lock, Thread
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from covey.data.loader import PromptLoader
from covey.parallel import processes
from covey.parallel.values import deserialize
from covey.rewards.scoring import RewardRunner
from covey.rl.metrics import Clock
from covey.rl.step_data import NextPrompts, PromptBatch, RolloutBatch, prompt_batches
from covey.sampling.responder import ResponderFactory
from covey.types import Completion

if TYPE_CHECKING:
    from covey.rl.learner import Learner

FORMER_CLASSES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "DrawnStep": ("covey.rl.rollouts:SampledStep", {}),
    "RolloutBatch": ("covey.rl.step_data:RolloutBatch", {}),
    "GroupTable": ("covey.rl.step_data:GroupTable", {"cut": "truncated", "mass": "kept_probability"}),
}
"""Class in earlier checkpoints, whatever its module was → its name now, and the fields whose names have changed."""


@dataclass(frozen=True)
class SampledStep:
    """Samples of a step, or of a part of it, and the state of the loop after them, as a checkpoint has it.

    Attributes:
        version: number of updates of the weights that sampled it.
        rollout: groups with rewards.
        failed: failures of each reward function since the run began.
        env_failed: failures of environments since then.
    """

    version: int
    rollout: RolloutBatch
    failed: Mapping[str, int] = field(default_factory=dict)
    env_failed: int = 0

    def without_times(self) -> "SampledStep":
        """Return the step without measured times, so that equal runs have equal checkpoints."""
        rollout, table = self.rollout, self.rollout.table
        groups = [replace(group, completions=tuple(map(_without_time, group.completions))) for group in rollout.groups]
        table = replace(table, episodes=[episode and replace(episode, seconds=0.0) for episode in table.episodes])
        stats = replace(rollout.stats, seconds=0.0, decode_seconds=0.0)
        return replace(self, rollout=replace(rollout, groups=groups, table=table, stats=stats, seconds={}))


def _without_time(completion: Completion) -> Completion:
    episode = completion.episode
    return completion if episode is None else replace(completion, episode=replace(episode, seconds=0.0))


def load_steps(saved: Iterable[bytes]) -> list[SampledStep]:
    """Return this process's part of each step of a checkpoint, given the bytes of each process (`serialize`)."""
    return [local_step(parts) for parts in zip(*(deserialize(data, _renamed) for data in saved), strict=True)]


def _renamed(name: str, fields: list[Any]) -> tuple[str, list[Any]]:
    """Return the names that a class and its fields have now."""
    name, now = FORMER_CLASSES.get(name.partition(":")[2], (name, {}))
    return name, [[now.get(field, field), value] for field, value in fields]


def local_step(parts: Sequence[SampledStep]) -> SampledStep:
    """Return this process's part of a step, given the parts of the processes that sampled it, few or many."""
    first, by_process = parts[0], [iter(part.rollout.groups) for part in parts]
    groups = [next(by_process[owner]) for owner in first.rollout.table.owner]
    sizes = np.diff(processes.here().slice_bounds(len(groups)))
    table = replace(first.rollout.table, owner=np.repeat(np.arange(processes.here().count), sizes))
    # Each count of the processes that sampled it goes to one process.
    kept = (part.rollout for part in parts[processes.here().index :: processes.here().count])
    rollout = reduce(RolloutBatch.joined, kept, RolloutBatch([]))
    counts = {name: getattr(rollout, name) for name in ("stats", "dropped", "failed", "seconds")}
    own = [*processes.here().local_slice(groups)[1]]
    return replace(first, rollout=replace(first.rollout, groups=own, table=table, **counts))


class Worker:
    """Thread that makes calls in their order until one raises an error, while it is used as a context.

    Leaving the context drops the calls that wait, and waits for the call in progress. Thread-local settings, such as
    JAX's `with jax.default_device(...)`, do not apply in the thread.

    Args:
        name: name of the thread.
        phase: name of the phase in which it waits for a call.
        on_phase: called in the thread as such a phase begins.
    """

    def __init__(self, name: str, phase: str, on_phase: Callable[[str], None] = lambda name: None):
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[float], None]] | None] = SimpleQueue()
        self._name, self._phase, self._on_phase = name, phase, on_phase
        self._closed, self._error = False, None  # type: bool, BaseException | None
        # A daemon, so that a second Ctrl-C, which breaks the join, also ends the process.
        self._thread = Thread(target=self._run, name=f"covey-{name}", daemon=True)

    def submit(self, future: Future[Any], call: Callable[[float], None]) -> None:
        """Make a call, with the seconds for which the thread has waited for it. `future` gets an error of it."""
        self._calls.put((future, call))

    def close(self) -> None:
        """Begin no further call."""
        self._closed = True
        self._calls.put(None)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()
        self._thread.join()
        if self._error is not None and error is None:
            raise self._error
        if self._error is not None and error is not None and self._error is not error:
            error.add_note(f"the {self._name} had failed too: {self._error!r}")

    def _run(self) -> None:
        while True:
            clock = Clock(on_phase=self._on_phase)
            with clock(self._phase):
                item = self._calls.get()
            if item is None or self._closed:
                return
            future, call = item
            try:
                call(clock.seconds[self._phase])
            except BaseException as error:
                self._error = error
                future.set_exception(error)
                return
            del item, call  # they have weights, whose memory is not held while the thread waits


SamplingContext = Callable[[], AbstractContextManager[None]]
"""Function that makes a context in which the rollout has the weights of a step, and no other thread samples."""


class Rollouts:
    """Rollouts of the steps of a run. Use it as a context.

    Args:
        learner: samples and scores prompts. The steps that it has `sampled` are not sampled again.
        loader: the prompts. Its position is that after the prompts of the step that is trained.
        total: updates of the whole run.

    Attributes:
        within_step: whether samples of a step come while it is trained.
    """

    def __init__(self, learner: "Learner", loader: PromptLoader, total: int):
        self._learner, self._loader, sampled = learner, loader, learner.sampled
        self._steps_ahead = learner.training.off_policy_steps
        rounds = learner.algorithm.max_sampling_rounds if self._steps_ahead else 1
        self._prompts_per_step = loader.prompts_per_step * rounds
        whole_step = self._steps_ahead > 0 or learner.algorithm.needs_whole_step
        self._part_size = loader.prompts_per_step if whole_step else learner.sizes.rollout_batch_size
        # Steps ahead have a position of their own.
        self._rows = copy(loader) if self._steps_ahead else loader
        self._rows.take(len(sampled) * self._prompts_per_step)
        self._steps = deque(range(learner.step + len(sampled), total, learner.config.num_iterations))
        self._sampled: deque[list[Callable[[], SampledStep]]] = deque([_known(step)] for step in sampled)
        self._threaded = learner.cluster.config.runs_ahead
        self._copies = self._threaded and self._steps_ahead > 0
        self.within_step = self._threaded and not self._copies
        self._sampling, self._turn = Lock(), Lock()
        self._sampler = Worker("sampler", "rollout_wait", learner.on_phase)
        self._scorer = Worker("scorer", "reward_wait", learner.on_phase)

    @contextmanager
    def running(self) -> Iterator[Self]:
        """Let the threads run, if there are some, as long as the context lasts."""
        self._learner.rollouts, self._learner.sampled = self, ()
        try:
            if not self._threaded:
                yield self
                return
            with self._sampler, self._scorer, closing(self._sampler):  # it stops before the scorer is waited for
                yield self
            if self._copies:
                with processes.here().phase("sync", self._learner.step):
                    self._learner.cluster.sync_weights()  # it may have the weights of k steps ago
        finally:
            self._learner.rollouts = None

    def of_step(self, step: int) -> Iterable[RolloutBatch]:
        """Return the rollouts of a step, in its parts; nothing where the data have ended. The actor must have the
        weights after `step` updates: they sample the steps that no earlier ones have to sample.
        """
        with self._learner.stats.clock("sync") if self._copies else nullcontext():
            self._begin(step)
        if not self._sampled:
            return ()
        parts = self._sampled.popleft()
        if not self._steps_ahead:
            return (part().rollout for part in parts)
        self._loader.take(self._prompts_per_step)
        with self._learner.stats.clock("wait"):
            (sampled,) = (part() for part in parts)
        self._learner.stats.version = sampled.version
        return [sampled.rollout]

    def new_weights(self) -> None:
        """Give the rollout the actor's weights after the updates of a step. Where it may be sampling it gets copies, as
        the next step begins.
        """
        if not self._copies:
            with self._learner.phase("sync"):
                self._learner.cluster.sync_weights()

    def unused_steps(self) -> list[SampledStep]:
        """Return the next k steps, which no later weights can sample, for a checkpoint; it may wait for them."""
        return [part() for parts in islice(self._sampled, self._steps_ahead) for part in parts]

    def rest(self) -> None:
        """Wait until nothing is sampled, and give the rollout the actor's weights, as for an evaluation."""
        if self._copies:
            # All that was begun, so that the threads of several processes rest at the same step.
            for part in (part for parts in self._sampled for part in parts):
                part()
            self._learner.cluster.rollout.update_params(self._copy_weights())

    def _begin(self, version: int) -> None:
        """Begin to sample the steps that the weights after `version` updates have to sample."""
        weights = None
        while self._steps and self._steps[0] <= version + self._steps_ahead:
            prompts = list(self._prompts(self._steps.popleft()))
            if not prompts:
                self._steps.clear()
                return
            if self._copies and weights is None:
                weights = self._copy_weights()
            self._sampled.append([self._begin_part(part, version, weights) for part in prompts])

    def _prompts(self, step: int) -> Iterator[PromptBatch]:
        """Yield the prompts of a step. With k > 0 they are one part, with prompts in reserve for dynamic sampling, so
        that no step waits for the rewards of another; the rest of the reserve is not used.
        """
        count, rows = self._loader.prompts_per_step, self._rows.take(self._prompts_per_step)
        reserve = iter(rows[count:])
        more: NextPrompts = (lambda missing: list(islice(reserve, missing))) if self._steps_ahead else self._loader.take
        return prompt_batches(rows[:count], step, self._part_size, more)

    def _begin_part(self, prompts: PromptBatch, version: int, weights: Any) -> Callable[[], SampledStep]:
        """Begin to sample prompts, and return a function that waits for the samples."""
        if self._threaded:
            future = Future[SampledStep]()
            self._sampler.submit(future, partial(self._sample, future, prompts, version, weights))
            return future.result
        sample = partial(self._sample_in_turn, prompts, version)
        return _known(sample()) if self._steps_ahead else sample

    def _sample_in_turn(self, prompts: PromptBatch, version: int) -> SampledStep:
        return self._score(self._learner.sample(prompts), prompts, version, nullcontext)

    def _sample(
        self, future: Future[SampledStep], prompts: PromptBatch, version: int, weights: Any, waited: float
    ) -> None:
        """Sample prompts, in the thread that samples."""
        context = partial(self._sampling_context, weights)
        with context():
            sampled = self._learner.sample(prompts)

        def score(waited_to_score: float) -> None:
            step = self._score(sampled, prompts, version, context)
            waits = {"rollout_wait": waited, "reward_wait": waited_to_score} if self._steps_ahead else {}
            rollout = replace(step.rollout, seconds={**step.rollout.seconds, **waits})
            future.set_result(replace(step, rollout=rollout))

        self._scorer.submit(future, score)

    def _score(
        self, sampled: RolloutBatch, prompts: PromptBatch, version: int, sampling_context: SamplingContext
    ) -> SampledStep:
        """Score samples, and replace groups without a signal."""
        rollout = self._learner.replace_tied(self._learner.score(sampled), prompts, sampling_context)
        return SampledStep(version, rollout, *self._learner.failures.agree(rollout.env_failed))

    @contextmanager
    def _sampling_context(self, weights: Any) -> Iterator[None]:
        """Let one thread at a time sample, with these weights: dynamic sampling may complete a step with older weights
        than the next step has.
        """
        with self._turn:  # who waits here comes next: the sampler begins no later step before a step is completed
            self._sampling.acquire()
        try:
            if weights is not None:
                self._learner.cluster.rollout.update_params(weights)
            yield
        finally:
            self._sampling.release()

    def _copy_weights(self) -> Any:
        """Copy the weights of the last update; of several processes, in the thread that trains."""
        with processes.here().phase("sync", self._learner.step):
            return self._learner.cluster.copy_weights()


def _known(step: SampledStep) -> Callable[[], SampledStep]:
    return lambda: step


class FailureCounts:
    """Counts of failures in all processes: the budgets of reward functions and environments hold for the whole run.

    A thread may sample later steps meanwhile. So the failures of environments in a step are taken as its sampling ends,
    and the failures of reward functions as it is scored. The first step with failures above a budget ends the run.

    Args:
        rewards: runs the reward functions of this process.
        environments: runs its environments, if there are some.
    """

    def __init__(self, rewards: RewardRunner, environments: ResponderFactory | None):
        self._rewards, self._environments, self._lock = rewards, environments, Lock()
        self.restart()

    def restart(self) -> None:
        """Begin from the counts of a checkpoint, which count all processes."""
        self._known = self.counts()
        self._taken = self._known[1]

    def take_sampled(self) -> int:
        """Return the failures of this process's environments since the last time; one thread at a time may sample."""
        with self._lock:
            before, self._taken = self._taken, self.counts()[1]
            return self._taken - before

    def agree(self, sampled: int) -> tuple[Counter[str], int]:
        """Add the failures of the other processes since the last time. All processes must call it.

        Args:
            sampled: failures of this process's environments since then.

        Returns:
            The failures of each reward function and of environments, in all processes since the run began.

        Raises:
            RewardError, EpisodeError: there are more in all processes than the budget allows.
        """
        rewards, environments = self.counts()[0], self._known[1] + sampled
        new = rewards - self._known[0]
        of_rewards, of_environments = zip(*processes.here().all_gather((dict(new), sampled), "failures"), strict=True)
        elsewhere = sum(map(Counter, of_rewards), Counter[str]()) - new, sum(of_environments) - sampled
        self._known = rewards + elsewhere[0], environments + elsewhere[1]
        if elsewhere[0]:
            self._rewards.count_elsewhere(elsewhere[0])
        if self._environments:
            with self._lock:
                self._taken += elsewhere[1]
                self._environments.count_elsewhere(elsewhere[1], self._known[1])
        return self.counts()[0], self._known[1]

    def counts(self) -> tuple[Counter[str], int]:
        """Return the failures of each reward function and of environments, as this process knows them."""
        return Counter(dict(self._rewards.failed)), self._environments.failed if self._environments else 0
