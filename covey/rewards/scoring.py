"""Score groups: call the reward functions, treat their failures, and weight their values.

`call` defines what a function receives and may return. By the policy of a function its failure raises an error, or the
reward becomes None or a fixed number; such failures are counted, and the run ends when they exceed a budget.

The completions for which a function fails are found by bisecting the batch; the others are then scored in one call, as
if the failing ones had never been sampled. There is no search when the result was malformed, since it might fit a
smaller call by accident, or when the function took long to raise, since a judge that timed out would time out many
times.

Functions run in the run's own process, or in workers of a package, which are killed when a call takes too long. Both
work in any thread: nothing depends on signals or on the main thread.
"""

import itertools
import logging
import threading
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from covey.config.schema import RewardSafetyConfig
from covey.errors import RecipeError, RewardError
from covey.losses.advantages import merge_ties
from covey.registry import offered
from covey.rewards.call import (
    LOST,
    MALFORMED,
    Attempt,
    Job,
    Outcome,
    Reward,
    RewardFn,
    RewardFns,
    Samples,
    format_error,
    make_rewards,
    metric_name,
    run_here,
)
from covey.types import Group

log = logging.getLogger(__name__)

SEARCH_SECONDS = 1.0
"""A function that raised in less time is called again with fewer completions, to find those for which it fails."""
MAX_LOST = 16
"""Maximum number of workers that may be lost in such a search."""


def score(
    groups: Sequence[Group],
    reward_fns: RewardFns,
    weights: Sequence[float] | None = None,
    runner: "RewardRunner | None" = None,
    failed: MutableMapping[str, int] | None = None,
) -> list[Group]:
    """Return the groups with `rewards` and `rewards_by_function` filled in.

    Args:
        groups: completions of any number of prompts; the functions see all of them in one call.
        reward_fns: one or more functions, or names that `resolve` accepts.
        weights: factor of each function in the total; all 1 by default. A function of weight 0 is called and
            listed, but affects neither the sum nor whether a completion counts as scored. What a function with the
            attribute `is_needed` does not score is not scored, whatever others say: an environment's reward has it.
        runner: decides where functions run and how failures are handled; by default in this process, raising an error.
        failed: receives the number of failures that the runner tolerated, by function.

    Raises:
        RecipeError: no function, an unknown name, or weights that do not fit the functions.
        RewardError: a function requires a missing column, raises, or returns anything but one finite number or None
            for each completion, and the runner has no other policy for it.
    """
    return Scorer(reward_fns, weights, runner).score(groups, failed)


class Scorer:
    """Score groups as `score` does, many times with the same functions: their signatures are read once.

    Attributes:
        rewards: the functions.
        runner: calls them.
    """

    def __init__(
        self, reward_fns: RewardFns, weights: Sequence[float] | None = None, runner: "RewardRunner | None" = None
    ):
        self.rewards, self.runner = make_rewards(reward_fns), runner or RewardRunner()
        self.runner.check({reward.name: reward.function for reward in self.rewards})
        self._weights = _check_weights(weights, len(self.rewards))
        self._is_needed = (self._weights != 0) & [getattr(r.function, "is_needed", False) for r in self.rewards]

    def score(self, groups: Sequence[Group], failed: MutableMapping[str, int] | None = None) -> list[Group]:
        """Return the groups with `rewards` and `rewards_by_function` filled in; arguments as for `score`."""
        if not groups:
            return []
        samples = [(group, completion) for group in groups for completion in group.completions]
        table = self.runner.run(self.rewards, samples, {} if failed is None else failed)
        scored = ~np.isnan(table) & (self._weights != 0)[:, None]
        summands = np.where(scored, table * self._weights[:, None], 0.0)
        totals, sizes = summands.sum(axis=0), np.abs(summands).sum(axis=0)
        totals[~scored.any(axis=0) | ~scored[self._is_needed].all(axis=0)] = np.nan
        scored_groups, start = list[Group](), 0
        for group in groups:
            part = slice(start, start := start + len(group.completions))
            rewards = merge_ties(totals[part], sizes[part])
            by_function = {reward.name: values[part] for reward, values in zip(self.rewards, table, strict=True)}
            scored_groups.append(replace(group, rewards=rewards, rewards_by_function=by_function))
        return scored_groups


def _check_weights(weights: Sequence[float] | None, count: int) -> np.ndarray:
    if not count:
        raise RecipeError("no reward function", want="at least one", fix="name one in rewards", where="rewards")
    factors = np.ones(count) if weights is None else np.asarray(weights, dtype=np.float64)
    if factors.shape != (count,) or not np.isfinite(factors).all():
        raise RecipeError(
            f"the weights {factors.tolist()} for {count} reward functions",
            want=f"{count} finite numbers",
            fix="one for each function",
            where="grpo.reward_weights",
        )
    if not factors.any():
        raise RecipeError(
            "the reward weights are all 0: no answer would be scored",
            want="one that is not 0",
            where="grpo.reward_weights",
        )
    return factors


class RewardRunner(AbstractContextManager["RewardRunner"]):
    """Call reward functions as `safety` specifies. With workers, close it or use it as a context manager.

    It is thread-safe. The first failure of each function is logged as a warning.

    Args:
        safety: the settings; by default, calls are made in this process and the first failure is raised.

    Attributes:
        failed: failures so far, by function; their sum is compared with the budget.
    """

    def __init__(self, safety: RewardSafetyConfig | None = None):
        self.safety = safety or RewardSafetyConfig()
        self.failed: dict[str, int] = {}
        self._policies = {metric_name(key.rpartition(":")[2]): p for key, p in self.safety.on_error_of.items()}
        self._reported: dict[str, RewardError] = {}
        self._workers: Any = offered("covey.isolation", "reward_workers")(self.safety) if self.safety.workers else None
        self._lock = threading.Lock()

    def check(self, functions: Mapping[str, RewardFn]) -> None:
        """Check that functions can be called under these settings.

        Raises:
            RecipeError: a worker could not import one of them.
        """
        for name, function in functions.items():
            if self._needs_worker(function):
                self._workers.check(name, function)

    def run(self, rewards: Sequence[Reward], samples: Samples, failed: MutableMapping[str, int]) -> np.ndarray:
        """Score `samples`: float64 [F, B], NaN for None.

        Functions in different workers run concurrently, and so do async functions of this process.

        Args:
            failed: receives the number of failures by function, except for functions whose policy is to raise.

        Raises:
            RewardError: a function whose policy is to raise failed, or the budget is exceeded.
        """
        columns = {column: None for group, _ in samples for column in group.columns}
        here, elsewhere = list[Job](), list[Job]()
        for reward in rewards:
            job = Job(reward, samples, reward.argument_names(columns))
            (elsewhere if self._needs_worker(reward.function) else here).append(job)
            if self.policy(reward.name) != "raise":  # in the order of the functions, whichever finishes first
                failed.setdefault(reward.name, 0)
                self.failed.setdefault(reward.name, 0)
        apply_policy = partial(self._apply_policy, failed)
        run = partial(run_here, here, apply_policy)
        values = self._workers.run(elsewhere, apply_policy, run) if elsewhere else run()
        return np.array([values[reward.name] for reward in rewards])

    def policy(self, name: str) -> str:
        """Return the failure policy of the function `name`, as in `RewardSafetyConfig.on_error`."""
        return self._policies.get(name, self.safety.on_error)

    def count_elsewhere(self, failures: Mapping[str, int]) -> None:
        """Count failures of other processes, by function.

        Raises:
            RewardError: there are more in all processes than the budget allows.
        """
        self._spend(failures, "one in another process")

    def close(self) -> None:
        """End the workers. They also end with this object and with the process."""
        if self._workers:
            self._workers.close()

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _needs_worker(self, function: RewardFn) -> bool:
        return bool(self._workers) and not getattr(function, "in_process", False)

    def _apply_policy(
        self, failed: MutableMapping[str, int], job: Job, outcome: Outcome, attempt: Attempt | None
    ) -> np.ndarray:
        """Return the values of a function, with failed ones replaced according to its policy."""
        values, failure = outcome.values, outcome.failure
        if values is not None and failure is None:
            return values
        assert failure is not None, "without values there is a reason"
        name, policy = job.reward.name, self.policy(job.reward.name)
        search = find_failing(outcome, attempt, len(job.samples), same=policy == "raise")
        failing = [*itertools.islice(search, 1 if policy == "raise" else None)]
        if failing:
            failure.sample = failing[0]
        error = format_error(name, failure, job.samples)
        if policy == "raise":
            raise error from failure.__cause__
        values, unscored = (
            score_without(failing, attempt, len(job.samples)) if values is None else (values, outcome.invalid)
        )
        failed[name] += len(unscored)
        self._spend({name: len(unscored)}, error.what, error.where)
        self._report(name, error)
        values[unscored] = np.nan if policy == "none" else self.safety.value
        return values

    def _report(self, name: str, error: RewardError) -> None:
        """Log the first error of a function."""
        if self._reported.setdefault(name, error) is error:
            instead = "not scored by it" if self.policy(name) == "none" else f"given {self.safety.value:g}"
            where, fix = f"{error.where}: " if error.where else "", f" ({error.fix})" if error.fix else ""
            log.warning(f"{where}{error.what}; such samples are {instead}, and rewards/{name}/failed counts them{fix}")

    def _spend(self, failures: Mapping[str, int], last: str, where: str = "") -> None:
        """Count failures by function, and raise when there are more than the budget allows."""
        with self._lock:
            self.failed |= {name: self.failed.get(name, 0) + count for name, count in failures.items()}
            counts = {name: count for name, count in self.failed.items() if count}
        if (total := sum(counts.values())) > self.safety.budget:
            by = ", ".join(f"{name} {count}" for name, count in counts.items())
            raise RewardError(
                f"{total} failures of reward functions ({by}), the last: {last}",
                want=f"at most {self.safety.budget} in a run",
                fix="mend the function; or a larger reward_safety.budget",
                where=where,
            )


def find_failing(outcome: Outcome, attempt: Attempt | None, count: int, same: bool) -> Iterator[int]:
    """Yield the completions for which a function fails even alone, after it failed with `outcome` for all `count`.

    Args:
        attempt: None when the function cannot be called again.
        same: find only those for which it fails in the same way.
    """
    failure, lost = outcome.failure, 0
    is_slow = outcome.seconds >= SEARCH_SECONDS
    if failure is None or attempt is None or failure.kind == MALFORMED or (is_slow and failure.kind != LOST):
        return iter(())

    def bisect(part: Sequence[int]) -> Iterator[int]:
        nonlocal lost
        if len(part) == 1:
            yield part[0]
            return
        middle = len(part) // 2
        for half in (part[:middle], part[middle:]):
            new = attempt(half) if lost < MAX_LOST else Outcome(np.zeros(0))
            lost += new.failure is not None and new.failure.kind == LOST
            if new.values is None and (not same or (new.failure and failure.is_like(new.failure))):
                yield from bisect(half)

    return bisect(range(count))


def score_without(failing: Sequence[int], attempt: Attempt | None, count: int) -> tuple[np.ndarray, list[int]]:
    """Score again without the failing completions; return all values and the indices of the completions without one.

    No completion has a value when the call still fails or when none of them fails alone.
    """
    values, rest = np.full(count, np.nan), [i for i in range(count) if i not in set(failing)]
    outcome = attempt(rest) if attempt and failing and rest else None
    if outcome is None or outcome.values is None:
        return values, [*range(count)]
    values[rest] = outcome.values
    return values, [*failing, *(rest[i] for i in outcome.invalid)]
