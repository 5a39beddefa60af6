"""Record of how a step was made, and its metrics, with the names of TRL's and Tunix's logs."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain
from typing import Any

import numpy as np
from jaxtyping import Float

from covey.config.algorithms import Algorithm
from covey.losses.advantages import EQUALITY_TOLERANCE, has_reward_variance
from covey.parallel import processes
from covey.registry import all_offered
from covey.rl.step_data import GroupTable, RolloutBatch, sum_by_name
from covey.sampling.model_runner import SamplerStats
from covey.sampling.responder import ResponderFactory
from covey.types import Group


@dataclass
class Clock:
    """Seconds spent in each phase; `on_phase` is called with the name of each phase as it begins."""

    seconds: dict[str, float] = field(default_factory=dict)
    on_phase: Callable[[str], None] = lambda name: None
    started: float = field(default_factory=time.perf_counter)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.on_phase(name)
        start = time.perf_counter()
        yield
        self.add({name: time.perf_counter() - start})

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add the seconds of phases that another clock measured."""
        for name, value in seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + value

    @property
    def elapsed(self) -> float:
        """Seconds since the clock was made."""
        return time.perf_counter() - self.started


def group_metrics(table: GroupTable) -> dict[str, float]:
    """Compute rewards, their spread, lengths, clipped and distinct ratio of a step's groups.

    `reward` and `rewards/<fn>/mean` average over completions; `reward_std` is the mean over groups of the standard
    deviation within a group (ddof 1); `reward_error` the standard error of `reward`, from the spread of the group
    means. `sampling/mass_kept` averages, over sampled tokens, the probability mass that truncation kept. A mean over
    nothing is NaN, and so is the standard deviation of fewer than two.
    """
    rewards = table.reward_table
    means = np.array([row[~np.isnan(row)].mean() for row in rewards if not np.isnan(row).all()])
    equal = table.split(table.first_equal)
    metrics = {
        "reward": float(np.nanmean(rewards)) if means.size else math.nan,
        "reward_std": known_mean([_std(row) for row in rewards]),
        "reward_error": _std(means) / math.sqrt(len(means) or 1),
        **_tied_fractions(rewards),
        "completions/mean_length": known_mean(table.sampled),
        "completions/min_length": float(min(table.sampled, default=math.nan)),
        "completions/max_length": float(max(table.sampled, default=math.nan)),
        "completions/clipped_ratio": known_mean(table.truncated),
        "completions/distinct_ratio": known_mean([len({*row}) / len(row) for row in equal]),
        "completions/empty_ratio": known_mean(table.empty),
        "completions/repetition": known_mean(table.repetition),
        "completions/scored_ratio": known_mean(~np.isnan(table.rewards)),
    }
    for name, values in table.by_function.items():
        metrics[f"rewards/{name}/mean"] = known_mean(values)
        metrics[f"rewards/{name}/std"] = _std(values)
    drawn = ~np.isnan(table.kept_probability)
    if drawn.any():
        metrics["sampling/mass_kept"] = float(table.kept_probability[drawn].sum() / table.sampled[drawn].sum())
    return metrics


def _tied_fractions(rewards: Float[np.ndarray, "P G"]) -> dict[str, float]:
    """Return the fraction of groups of equal rewards, and of those that all have the best and the worst reward of the
    step, among the groups with a reward. If a step has a single reward, it is the best one where it is above 0.
    """
    rewards = rewards[~np.isnan(rewards).all(axis=1)]
    tied = np.array([not has_reward_variance(row) for row in rewards], bool)
    best, worst = np.nanmax(rewards, initial=-np.inf), np.nanmin(rewards, initial=np.inf)
    near = partial(np.isclose, np.nanmax(rewards, axis=1, initial=-np.inf), rtol=EQUALITY_TOLERANCE, atol=0)
    is_best = near(best) & (best > min(worst, 0))
    fractions = {"zero_std": tied, "all_best": tied & is_best, "all_worst": tied & near(worst) & ~is_best}
    return {f"frac_reward_{name}": known_mean(of_groups) for name, of_groups in fractions.items()}


@cache
def offered_metrics() -> list[Callable[[GroupTable], Mapping[str, float]]]:
    """Return the functions from the table of a step to metrics that packages offer by the entry points
    `covey.metrics`.
    """
    return [load() for load in all_offered("covey.metrics").values()]


def combine_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the metrics of several updates on one batch: means, and minima or maxima for `/min` and `/max`, over the
    updates that have them (a skipped update, or one without tokens, has few).
    """
    combine = {"min": min, "max": max}
    values = {
        name: [update[name] for update in updates if not np.isnan(update.get(name, math.nan))]
        for update in updates
        for name in update
    }
    return {
        name: float(combine.get(name.rsplit("/", 1)[-1], known_mean)(of_updates or [math.nan]))
        for name, of_updates in values.items()
    }


def work_metrics(
    stats: SamplerStats, seconds: Mapping[str, float], step_time: float, row_waste: float
) -> dict[str, Any]:
    """Return tokens, padding and time of a step; `seconds` is by phase, and phases of two threads may overlap."""
    return {
        "num_tokens": stats.tokens + stats.appended_tokens + stats.prompt_tokens,
        "waste/rollout": stats.waste,
        "waste/slots": stats.slot_waste,
        "waste/rows": row_waste,
        "tokens_per_second": stats.tokens / step_time,
        "step_time": step_time,
        **{f"time/{phase}": value for phase, value in seconds.items()},
    }


def known_mean(values: Sequence[float] | np.ndarray) -> float:
    """Return the mean of the values that are known; NaN without any."""
    known = np.asarray(values)[~np.isnan(values)]
    return float(known.mean()) if known.size else math.nan


def _std(values: np.ndarray) -> float:
    """Return the standard deviation of the values that are known (ddof 1); NaN for fewer than two."""
    known = values[~np.isnan(values)]
    return float(known.std(ddof=1)) if known.size > 1 else math.nan


@dataclass
class StepStats:
    """Record of how a step's data was made.

    Attributes:
        clock: measures the phases.
        rollout: all groups that this process has sampled, with advantages (0 for replaced groups), the table of all
            processes, and sums of counts.
        waste: fraction of padding in each micro-batch's rows.
        version: number of updates of the weights that sampled the step, where samples may be older than the weights.
    """

    clock: Clock = field(default_factory=Clock)
    rollout: RolloutBatch = field(default_factory=lambda: RolloutBatch([]))
    waste: list[float] = field(default_factory=list)
    version: int = 0

    def add(self, rollout: RolloutBatch, trained: Sequence[Group]) -> None:
        """Add a rollout, and the advantages of its groups to train on."""
        self.rollout = self.rollout.joined(rollout.with_advantages(trained))
        self.clock.add(rollout.seconds)


def gather_step_stats(stats: StepStats) -> StepStats:
    """Return the record with the counts of all processes, and the time of each phase in the slowest process."""
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
    """Compute the metrics of a step from the record of all processes and the metrics of its updates."""
    rollout, dynamic = stats.rollout, algorithm.max_sampling_rounds > 1
    groups_prompts = environments is not None and environments.groups_prompts
    counts = {"rounds": 1 + rollout.rounds, "replaced": rollout.replaced, "tied": rollout.tied}
    return {
        **group_metrics(rollout.table),
        **{name: value for measure in offered_metrics() for name, value in measure(rollout.table).items()},
        **(environments.metrics(rollout.table) if environments else {}),
        **{f"rewards/{name}/failed": float(count) for name, count in rollout.failed.items()},
        **combine_updates(updates),
        **({"env/dropped": float(rollout.dropped)} if groups_prompts else {}),
        **({f"dynamic_sampling/{name}": float(count) for name, count in counts.items()} if dynamic else {}),
        **work_metrics(rollout.stats, stats.clock.seconds, stats.clock.elapsed, known_mean(stats.waste)),
    }
