"""Run reward functions so that a failure in one need not end a long run: `RewardRunner`.

Functions run in the run's own process, or in workers of a package, which are killed when a call takes too long. By the
function's policy a failure raises an error, or its reward becomes None or a fixed number; such failures are counted,
and the run ends when they exceed a budget.

The completions for which a function fails are found by bisecting the batch; the others are then scored in one call, as
if the failing ones had never been sampled. There is no search when the result was malformed, since it might fit a
smaller call by accident, or when the function took long to raise, since a judge that timed out would time out many
times.

The runner works in any thread: nothing depends on signals or on the main thread.
"""

import inspect
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from covey.config.schema import RewardSafetyConfig
from covey.errors import RewardError
from covey.exits import block_exit
from covey.registry import offered
from covey.rewards.call import (
    LOST,
    MALFORMED,
    Outcome,
    RewardFn,
    Samples,
    await_outcome,
    call,
    format_error,
    from_exception,
    metric_name,
    select_arguments,
)

log = logging.getLogger(__name__)

SEARCH_SECONDS = 1.0
"""A function that raised in less time is called again with fewer completions, to find those for which it fails."""
MAX_LOST = 16
"""Maximum number of workers that may be lost in such a search."""

Attempt = Callable[[Sequence[int]], Outcome]
"""Callable that calls a function on some of its completions, given by index."""


@dataclass(frozen=True)
class Job:
    """A function, the completions that it scores, its arguments, and the counts of failures of this run."""

    name: str
    function: RewardFn
    samples: Samples
    arguments: Mapping[str, list[Any]]
    failed: MutableMapping[str, int]


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
        self._reported: set[str] = set()
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

    def run(
        self, functions: Mapping[str, RewardFn], samples: Samples, failed: MutableMapping[str, int] | None = None
    ) -> np.ndarray:
        """Score `samples` with `functions` (keyed by metric name): float64 [F, B], NaN for None.

        Functions in different workers run concurrently, and so do async functions of this process.

        Args:
            failed: receives the number of failures by function, except for functions whose policy is to raise.

        Raises:
            RewardError: a function whose policy is to raise failed, or the budget is exceeded.
        """
        failed = {} if failed is None else failed
        self._start_counts(functions, failed)
        jobs = [
            Job(name, function, samples, select_arguments(name, function, samples), failed)
            for name, function in functions.items()
        ]
        run_here = partial(self._run_in_process, [job for job in jobs if not self._needs_worker(job.function)])
        elsewhere = [job for job in jobs if self._needs_worker(job.function)]
        values = self._workers.run(elsewhere, self._apply_policy, run_here) if elsewhere else run_here()
        return np.array([values[name] for name in functions])

    def policy(self, name: str) -> str:
        """Return the failure policy of the function `name`, as in `RewardSafetyConfig.on_error`."""
        policies = {metric_name(key.rpartition(":")[2]): policy for key, policy in self.safety.on_error_of.items()}
        return policies.get(name, self.safety.on_error)

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

    def _start_counts(self, functions: Iterable[str], failed: MutableMapping[str, int]) -> None:
        """Start the failure counts at 0, in the order of the functions, whichever finishes first."""
        with self._lock:
            for name in (name for name in functions if self.policy(name) != "raise"):
                failed.setdefault(name, 0)
                self.failed.setdefault(name, 0)

    def _needs_worker(self, function: RewardFn) -> bool:
        return bool(self._workers) and not getattr(function, "in_process", False)

    def _run_in_process(self, jobs: Sequence[Job]) -> dict[str, np.ndarray]:
        """Run functions in this process; coroutines in their own thread, as a notebook's already runs a loop."""
        values: dict[str, np.ndarray] = {}
        waiting: list[tuple[Job, Awaitable[Any]]] = []
        try:
            for job in jobs:
                start = time.perf_counter()
                with block_exit():
                    outcome = call(job.function, job.arguments, len(job.samples))
                if inspect.isawaitable(outcome):
                    waiting.append((job, outcome))
                    continue
                outcome = replace(outcome, seconds=time.perf_counter() - start)
                values[job.name] = self._apply_policy(job, outcome, _attempt_in_process(job))
        except BaseException:
            for _, coroutine in waiting:
                getattr(coroutine, "close", lambda: None)()
            raise
        for (job, _), outcome in zip(waiting, _await_together(waiting), strict=True):
            values[job.name] = self._apply_policy(job, outcome, None)
        return values

    def _apply_policy(self, job: Job, outcome: Outcome, attempt: Attempt | None) -> np.ndarray:
        """Return the values of a function, with failed ones replaced according to its policy."""
        if outcome.values is not None and not outcome.invalid:
            return outcome.values
        policy, failure = self.policy(job.name), outcome.failure
        search = find_failing(outcome, attempt, len(job.samples), same=policy == "raise")
        failing = [*islice(search, 1 if policy == "raise" else None)]
        if failure and failing:
            outcome = replace(outcome, failure=replace(failure, sample=failing[0]))
        error = format_error(job.name, outcome, job.samples)
        if policy == "raise":
            raise error from (failure.error if failure else None)
        values, unscored = outcome.values, sorted(outcome.invalid)
        if values is None:
            values, unscored = score_without(failing, attempt, len(job.samples))
        self._count(job, error, len(unscored))
        values[unscored] = np.nan if policy == "none" else self.safety.value
        return values

    def _count(self, job: Job, error: RewardError, count: int) -> None:
        """Count failures of a function, the last of which is `error`, and report the first one."""
        job.failed[job.name] += count
        self._spend({job.name: count}, error.what, error.where)
        with self._lock:
            new = job.name not in self._reported
            self._reported.add(job.name)
        if new:
            instead = "not scored by it" if self.policy(job.name) == "none" else f"given {self.safety.value:g}"
            where = f"{error.where}: " if error.where else ""
            fix = f" ({error.fix})" if error.fix else ""
            log.warning(
                f"{where}{error.what}; such samples are {instead}, and rewards/{job.name}/failed counts them{fix}"
            )

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


def _attempt_in_process(job: Job) -> Attempt:
    """Return an attempt in this process, with fresh argument lists, as the function may have modified the old ones."""

    def attempt(part: Sequence[int]) -> Outcome:
        arguments = select(select_arguments(job.name, job.function, job.samples), part)
        with block_exit():
            outcome = call(job.function, arguments, len(part))
        if isinstance(outcome, Outcome):
            return outcome
        return _await_together([(replace(job, samples=[job.samples[i] for i in part]), outcome)])[0]

    return attempt


def select(arguments: Mapping[str, list[Any]], part: Sequence[int]) -> dict[str, list[Any]]:
    """Return the arguments for some of the completions."""
    return {key: [values[i] for i in part] for key, values in arguments.items()}


def _await_together(waiting: Sequence[tuple[Job, Awaitable[Any]]]) -> list[Outcome]:
    """Await async functions concurrently in a thread and return their outcomes.

    An exit in one of their tasks ends the event loop and becomes the outcome of all unfinished functions.
    """
    if not waiting:
        return []

    import asyncio  # imported late: it would noticeably delay the command's error about a typo

    outcomes: dict[str, Outcome] = {}

    async def settle(job: Job, result: Awaitable[Any]) -> None:
        outcomes[job.name] = await await_outcome(result, len(job.samples))

    async def settle_all() -> None:
        await asyncio.gather(*(settle(job, result) for job, result in waiting))

    def run() -> list[Outcome]:
        try:
            with block_exit():
                asyncio.run(settle_all())
        except SystemExit as error:  # the loop has cancelled the pending tasks
            for job, _ in waiting:
                failure = outcomes[job.name].failure if job.name in outcomes else None
                if job.name not in outcomes or (failure and isinstance(failure.error, asyncio.CancelledError)):
                    outcomes[job.name] = from_exception(error)
        return [outcomes[job.name] for job, _ in waiting]

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


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

    def fails(part: Sequence[int]) -> bool:
        nonlocal lost
        new = attempt(part).failure if lost < MAX_LOST else None
        lost += new is not None and new.kind == LOST
        return new is not None and (not same or new.is_like(failure))

    return _bisect(fails, range(count))


def _bisect(fails: Callable[[Sequence[int]], bool], part: Sequence[int]) -> Iterator[int]:
    if len(part) == 1:
        yield part[0]
        return
    middle = len(part) // 2
    for half in (part[:middle], part[middle:]):
        if fails(half):
            yield from _bisect(fails, half)


def score_without(failing: Sequence[int], attempt: Attempt | None, count: int) -> tuple[np.ndarray, list[int]]:
    """Score again without the failing completions; return all values and the indices of the completions without one.

    No completion has a value when the call still fails or when none of them fails alone.
    """
    values, rest = np.full(count, np.nan), [i for i in range(count) if i not in set(failing)]
    if attempt is None or not failing or not rest:
        return values, [*range(count)]
    outcome = attempt(rest)
    if outcome.values is None:
        return values, [*range(count)]
    values[rest] = outcome.values
    return values, sorted([*failing, *(rest[i] for i in outcome.invalid)])
