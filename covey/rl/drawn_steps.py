"""Steps whose samples are drawn ahead of training. With k = `training.off_policy_steps`, steps counted from 0, and one
update in each,

    weights after so many updates     0              1      2      3
    draw the rollouts of the steps    0, 1 … k       k+1    k+2    k+3
    and train them at step            0              1      2      3

So step s trains on samples of the weights after max(s − k, 0) updates. Which weights draw which step, and the order of
the steps, follow from these numbers alone, never from the clock: threads that draw while another one trains
(`RolloutThreads`) give the same samples as a run that takes turns (`RolloutsAhead`), and a late rollout is waited for.

One thread samples the steps in their order, and a second one scores them in theirs: while reward functions wait, the
next steps are sampled.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import islice, starmap
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from covey.parallel import processes
from covey.rl.experience import RolloutBatch
from covey.rl.metrics import Clock
from covey.rl.run_ahead import DataQueue, produce
from covey.types import Completion

if TYPE_CHECKING:
    from covey.rl.cluster import RLCluster

T = TypeVar("T")


@dataclass(frozen=True)
class DrawnStep:
    """Rollout of a step, and the state of the loop behind it, as a checkpoint has it.

    Attributes:
        version: number of updates of the weights that drew it.
        rollout: groups with rewards, of all prompts of the step.
        failed: failures of each reward function since the run began.
        env_failed: failures of environments since then.
    """

    version: int
    rollout: RolloutBatch
    failed: Mapping[str, int] = field(default_factory=dict)
    env_failed: int = 0

    def behind(self, clock: Clock) -> "DrawnStep":
        """Return the step with the seconds of `clock`, which measured what came before it."""
        seconds = {**self.rollout.seconds, **clock.seconds}
        return replace(self, rollout=replace(self.rollout, seconds=seconds))

    def without_times(self) -> "DrawnStep":
        """Return the step without what clocks have measured, so that equal runs have equal checkpoints."""
        rollout, table = self.rollout, self.rollout.table
        groups = [replace(group, completions=tuple(map(_without_time, group.completions))) for group in rollout.groups]
        table = replace(table, episodes=[one and replace(one, seconds=0.0) for one in table.episodes])
        stats = replace(rollout.stats, seconds=0.0, decode_seconds=0.0)
        return replace(self, rollout=replace(rollout, groups=groups, table=table, stats=stats, seconds={}))


def _without_time(completion: Completion) -> Completion:
    episode = completion.episode
    return completion if episode is None else replace(completion, episode=replace(episode, seconds=0.0))


Drawing = Callable[[], AbstractContextManager[None]]
"""Function that makes a context in which the rollout has the weights of a step, and no other thread samples."""
Finish = Callable[[], DrawnStep]
"""Function that scores a step that was sampled, and samples again what dynamic sampling replaces."""
Draw = Callable[[int, int, Drawing], Finish | None]
"""Function (step, version, drawing) that samples a step with the weights of that version; None when the data have
ended. It samples in the context `drawing()`, and so does what it returns.
"""


def own_share(parts: Sequence[DrawnStep]) -> DrawnStep:
    """Return this process's share of a step, given those of the processes that drew it, perhaps of another number."""
    first, of_each = parts[0], [iter(part.rollout.groups) for part in parts]
    groups = [next(of_each[owner]) for owner in first.rollout.table.owner]
    sizes = np.diff(processes.here().share_bounds(len(groups)))
    table = replace(first.rollout.table, owner=np.repeat(np.arange(processes.here().count), sizes))
    # Each count of the processes that drew it goes to one process.
    kept = (part.rollout for part in parts[processes.here().index :: processes.here().count])
    rollout = reduce(RolloutBatch.joined, kept, RolloutBatch([]))
    counts = {name: getattr(rollout, name) for name in ("stats", "dropped", "failed", "seconds")}
    return replace(
        first, rollout=replace(first.rollout, groups=[*processes.here().share(groups)[1]], table=table, **counts)
    )


class RolloutsAhead:
    """Rollouts of the next steps, drawn in turns with training: as soon as there are new weights, the steps that these
    have to draw.

    Args:
        draw: draws a step.
        lead: number of steps k by which samples may be older than the weights that train on them.
        steps: the steps that are not drawn yet.
        drawn: steps that are, from a checkpoint.
    """

    takes_copies = False
    """Whether it draws with copies of the weights, and the rollout need not have the last ones."""

    def __init__(self, draw: Draw, lead: int, steps: range, drawn: Iterable[DrawnStep] = ()):
        self._draw, self._lead, self._steps = draw, lead, deque(steps)
        self._ready: deque[DrawnStep | None] = deque(drawn)
        self._left = len(self._ready) + len(self._steps)

    def offer(self, version: int) -> None:
        """Let the weights after `version` updates, which are those of the rollout, draw their steps."""
        for step in self._due(version):
            finish = self._draw(step, version, nullcontext)
            self._ready.append(finish and finish())

    def take(self) -> DrawnStep | None:
        """Return the next step; None when the data have ended."""
        self._wait_for(1)
        self._left -= 1
        return self._ready.popleft()

    def waiting(self) -> list[DrawnStep]:
        """Return the k steps behind those that were taken, which no later weights can draw, for a checkpoint."""
        self._wait_for(self._lead)
        return [step for step in islice(self._ready, self._lead) if step is not None]

    def paused(self) -> AbstractContextManager[None]:
        """Return a context in which nothing is drawn, and the rollout has the weights of the last update."""
        return nullcontext()

    def _due(self, version: int) -> list[int]:
        """Return the steps that these weights have to draw."""
        due = []
        while self._steps and self._steps[0] <= version + self._lead:
            due.append(self._steps.popleft())
        return due

    def _wait_for(self, count: int) -> None:
        """Wait until so many steps are ready, or all that there are."""


class RolloutThreads(RolloutsAhead):
    """The same rollouts, drawn while another thread trains: one thread samples them, and one scores them. Use it as a
    context.

    In several processes each has such threads, which launch programs of its own process alone. Those that score meet
    where they exchange rewards, in the order of the steps, and all rest where all that was offered is drawn.

    Args:
        draw, lead, steps, drawn: see `RolloutsAhead`.
        copy_weights: makes a copy of the weights of the last update, as the rollout takes them.
        set_weights: gives the rollout such a copy.
        on_phase: called in a thread when it begins to wait for weights or samples, with the name of that phase.
    """

    takes_copies = True

    def __init__(
        self,
        draw: Draw,
        lead: int,
        steps: range,
        drawn: Iterable[DrawnStep] = (),
        *,
        copy_weights: Callable[[], Any],
        set_weights: Callable[[Any], None],
        on_phase: Callable[[str], None] = lambda name: None,
    ):
        super().__init__(draw, lead, steps, drawn)
        self._copy, self._set_weights, self._on_phase = copy_weights, set_weights, on_phase
        self._end, self._sampling, self._turn = steps.stop, Lock(), Lock()
        self._offers: DataQueue[tuple[list[int], int, Any]] = DataQueue(lead + 2)
        self._sampled: DataQueue[tuple[Finish | None, Clock]] = DataQueue(lead + 1)
        self._results: DataQueue[DrawnStep | None] = DataQueue(lead + 1)

    @contextmanager
    def running(self) -> Iterator["RolloutThreads"]:
        """Draw in two threads, as long as the context lasts."""
        drawn = starmap(self._finish, self._waited(self._sampled, "reward_wait"))
        with (  # what a thread waits for is closed before it is waited for, also where the second one cannot start
            produce(self._sample_offers(), self._sampled, "sampler"),
            closing(self._offers),
            produce(drawn, self._results, "scorer"),
            closing(self._sampled),
        ):
            yield self

    def offer(self, version: int) -> None:
        if due := self._due(version):
            self._offers.put((due, version, self._copy_weights()))

    @contextmanager
    def paused(self) -> Iterator[None]:
        # All that was offered, so that the threads of several processes rest at the same step.
        self._wait_for(self._left - len(self._steps))
        self._set_weights(self._copy_weights())
        yield

    def _copy_weights(self) -> Any:
        """Copy the weights of the last update; of several processes, in the thread that trains."""
        with processes.here().phase("sync", self._end - self._left):
            return self._copy()

    def _sample_offers(self) -> Iterator[tuple[Finish | None, Clock]]:
        for (steps, version, weights), clock in self._waited(self._offers, "rollout_wait"):
            for step in steps:
                yield self._draw(step, version, partial(self._drawing, weights)), clock
                clock = Clock({"rollout_wait": 0.0})
            del weights

    @contextmanager
    def _drawing(self, weights: Any) -> Iterator[None]:
        """Let one thread at a time sample, with these weights: a step that dynamic sampling completes has other ones
        than those that are sampled meanwhile.
        """
        with self._turn:  # who waits here comes next: the sampler begins no later step before a step is completed
            self._sampling.acquire()
        try:
            self._set_weights(weights)
            yield
        finally:
            self._sampling.release()

    def _finish(self, sampled: tuple[Finish | None, Clock], waited: Clock) -> DrawnStep | None:
        finish, clock = sampled
        clock.add(waited.seconds)
        drawn = finish and finish()
        return drawn and drawn.behind(clock)

    def _waited(self, queue: DataQueue[T], phase: str) -> Iterator[tuple[T, Clock]]:
        """Yield the items of a queue, each with the time for which it was waited."""
        while True:
            clock = Clock(on_phase=self._on_phase)
            with clock(phase):
                item = next(iter(queue), None)
            if item is None:
                return
            yield item, clock
            del item  # it has weights, whose memory is not held while the thread waits

    def _wait_for(self, count: int) -> None:
        while len(self._ready) < min(count, self._left):
            self._ready.append(self._results.get())


@contextmanager
def rollouts_ahead(
    draw: Draw,
    lead: int,
    steps: range,
    drawn: Iterable[DrawnStep],
    cluster: "RLCluster",
    on_phase: Callable[[str], None],
) -> Iterator[RolloutsAhead]:
    """Draw steps in turns with training, or in threads where the cluster's settings ask for them; arguments as for
    `RolloutThreads`.
    """
    if not cluster.config.runs_ahead:
        yield RolloutsAhead(draw, lead, steps, drawn)
        return
    weights: Any = {"copy_weights": cluster.copy_weights, "set_weights": cluster.rollout.update_params}
    with RolloutThreads(draw, lead, steps, drawn, **weights, on_phase=on_phase).running() as threads:
        yield threads
    with processes.here().phase("sync", steps.stop):
        cluster.sync_weights()  # the last that it was given may be those of k steps ago
