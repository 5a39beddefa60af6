"""Record of how a step was made, in one process and in all: its rollouts, its phases, its padding, and the failures."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from threading import Lock

from covey.config.algorithms import Algorithm
from covey.parallel import processes
from covey.rewards import RewardRunner
from covey.rl.experience import RolloutBatch, sum_by_name
from covey.rl.metrics import Clock, combine_updates, group_metrics, known_mean, sampling_metrics, work_metrics
from covey.sampling.model_runner import SamplerStats
from covey.sampling.responder import ResponderFactory
from covey.types import Group


@dataclass
class StepStats:
    """Record of how a step's data was made.

    Attributes:
        clock: measures the phases.
        rollout: all groups that this process has sampled, with advantages (0 for replaced ones), the numbers of those
            of all processes, and the sums of their rollouts' counts.
        waste: fraction of padding in each micro-batch's rows.
        version: number of updates of the weights that sampled the step, where samples may be older than the weights.
    """

    clock: Clock = field(default_factory=Clock)
    rollout: RolloutBatch = field(default_factory=lambda: RolloutBatch([]))
    waste: list[float] = field(default_factory=list)
    version: int = 0

    def add(self, rollout: RolloutBatch, trained: Sequence[Group]) -> None:
        """Add a rollout, whose groups to train on are `trained` since they have advantages."""
        self.rollout = self.rollout.joined(rollout.with_advantages(trained))
        self.clock.add(rollout.seconds)


def gather_step_stats(stats: StepStats) -> StepStats:
    """Return the record with what all processes sampled and scored, and the time of each phase in the slowest one."""
    local = stats.rollout.stats, stats.rollout.failed, stats.rollout.dropped, stats.clock.seconds
    sampler, failed, dropped, seconds = zip(*processes.here().all_gather(local, "step"), strict=True)
    phases = {phase: max(each.get(phase, 0.0) for each in seconds) for phase in dict.fromkeys(chain(*seconds))}
    rollout = replace(
        stats.rollout, stats=sum(sampler, SamplerStats()), failed=sum_by_name(*failed), dropped=sum(dropped)
    )
    return replace(stats, clock=replace(stats.clock, seconds=phases), rollout=rollout)


def step_metrics(
    stats: StepStats,
    updates: Sequence[Mapping[str, float]],
    algorithm: Algorithm,
    environments: ResponderFactory | None,
) -> dict[str, float]:
    """Compute the metrics of a step from the record of all processes, and from those of its updates."""
    rollout, dynamic = stats.rollout, algorithm.max_sampling_rounds > 1
    groups_prompts = environments is not None and environments.groups_prompts
    return {
        **group_metrics(rollout.table),
        **{f"rewards/{name}/failed": float(count) for name, count in rollout.failed.items()},
        **combine_updates(updates),
        **({"env/dropped": float(rollout.dropped)} if groups_prompts else {}),
        **(sampling_metrics(1 + rollout.rounds, rollout.replaced, rollout.tied) if dynamic else {}),
        **work_metrics(rollout.stats, stats.clock.seconds, stats.clock.elapsed, known_mean(stats.waste)),
    }


class FailureCounts:
    """Counts of failures in all processes, so that the budgets of reward functions and environments hold for the whole
    run. Those of a step follow from its number, while a thread may be sampling later ones: so the failures of
    environments are taken as each of its samples ends, and those of reward functions as it is scored. The step whose
    failures exceed a budget ends the run, also where a later one is being sampled.

    Args:
        rewards: runs the reward functions of this process.
        environments: runs its environments, if there are some.
    """

    def __init__(self, rewards: RewardRunner, environments: ResponderFactory | None):
        self._rewards, self._environments, self._lock = rewards, environments, Lock()
        self.restart()

    def restart(self) -> None:
        """Begin from the counts of a checkpoint, which are those of all processes."""
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
            The failures of each reward function and those of environments, in all processes since the run began.

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
        """Return the failures of each reward function and those of environments, as this process knows them."""
        return Counter(dict(self._rewards.failed)), self._environments.failed if self._environments else 0
