"""Run reward functions so that a failure in one need not end a long run: `RewardRunner`.

Functions run in the run's own process, or in workers (`workers`), which are killed when a call takes too long. By the
function's policy a failure raises an error, or its reward becomes None or a fixed number; such failures are counted,
and the run ends when they exceed a budget. To find the failing completions, a batch for which a function fails is
bisected; the others are then scored in one call, as if the failing ones had never been sampled.

The runner works in any thread: nothing depends on signals or on the main thread.
"""

import inspect
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from covey.config.recipe import validate
from covey.config.reward_safety import RewardSafetyConfig
from covey.errors import RewardError
from covey.rewards import exits
from covey.rewards.call import LOST, MISSHAPEN, Outcome, RewardFn, Samples, call, finished, raised, taken, told
from covey.rewards.sandbox.workers import Worker, place_of, portable

SEARCH_SECONDS = 1.0
"""A function that raised in less time is called again with fewer completions, to find those for which it fails."""
MOST_LOST = 16
"""Maximum number of workers that may be lost in such a search."""


@dataclass(frozen=True)
class _Settings:
    """The section of a recipe that a runner uses, under the name that `recipe.validate` expects."""

    reward_safety: RewardSafetyConfig


@dataclass(frozen=True)
class _Call:
    """A function, its arguments and the completions to score."""

    name: str
    function: RewardFn
    samples: Samples
    arguments: Mapping[str, list[Any]]


Attempt = Callable[[Sequence[int]], Outcome]
"""Callable that calls a function on some of its completions, given by index."""


class RewardRunner:
    """Call reward functions as `safety` specifies. With workers, close it or use it as a context manager.

    It is thread-safe.

    Args:
        safety: the settings; by default, calls are made in this process and the first failure is raised.
        say: called with a message about the first failure of each function.

    Attributes:
        failed: failures so far, by function; their sum is compared with the budget.

    Raises:
        RecipeError: the settings contradict each other.
    """

    def __init__(self, safety: RewardSafetyConfig | None = None, say: Callable[[str], None] | None = None):
        self.safety = safety or RewardSafetyConfig()
        if safety is not None:
            validate(_Settings(safety))
        self.failed: dict[str, int] = {}
        self._say = say or logging.getLogger(__name__).warning
        self._said: set[str] = set()
        self._workers = [Worker() for _ in range(self.safety.workers)]
        self._homes: dict[str, Worker] = {}
        self._lock = threading.Lock()

    def check(self, functions: Mapping[str, RewardFn]) -> None:
        """Refuse functions that cannot be called under these settings.

        Raises:
            RecipeError: a worker could not import one of them.
        """
        for name, function in functions.items():
            if self._is_apart(function):
                place_of(name, function)

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
        self._begin(functions, failed)
        calls = [_Call(name, fn, samples, taken(name, fn, samples)) for name, fn in functions.items()]
        apart = {one.name: self._home(one.name) for one in calls if self._is_apart(one.function)}
        given_up = threading.Event()
        with ThreadPoolExecutor(max(1, len(apart))) as threads:
            futures = {
                one.name: threads.submit(self._run_apart, one, apart[one.name], given_up, failed)
                for one in calls
                if one.name in apart
            }
            try:
                columns = self._run_here([one for one in calls if one.name not in apart], failed)
                columns |= _results(futures)
            except BaseException:
                given_up.set()
                raise
        return np.array([columns[name] for name in functions])

    def policy(self, name: str) -> str:
        """Return the failure policy of the function `name`, as in `RewardSafetyConfig.on_error`."""
        given = {key.rpartition(":")[2]: policy for key, policy in self.safety.on_error_of.items()}
        return given.get(name, self.safety.on_error)

    def close(self) -> None:
        """End the workers. They also end with this object and with the process."""
        for worker in self._workers:
            worker.close()

    def __enter__(self) -> "RewardRunner":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _begin(self, functions: Iterable[str], failed: MutableMapping[str, int]) -> None:
        """Start the failure counts at 0, in the order of the functions, whichever finishes first."""
        with self._lock:
            for name in (name for name in functions if self.policy(name) != "raise"):
                failed.setdefault(name, 0)
                self.failed.setdefault(name, 0)

    def _is_apart(self, function: RewardFn) -> bool:
        return bool(self._workers) and not getattr(function, "in_process", False)

    def _run_here(self, calls: Sequence[_Call], failed: MutableMapping[str, int]) -> dict[str, np.ndarray]:
        """Run functions in this process; coroutines in their own thread, as a notebook's already runs a loop."""
        columns: dict[str, np.ndarray] = {}
        waiting: dict[str, tuple[_Call, Awaitable[Any]]] = {}
        try:
            for one in calls:
                start = time.perf_counter()
                with exits.refused():
                    outcome = call(one.function, one.arguments, len(one.samples))
                if inspect.isawaitable(outcome):
                    waiting[one.name] = one, outcome
                    continue
                outcome = replace(outcome, seconds=time.perf_counter() - start)
                columns[one.name] = self._settled(one, outcome, _here(one), failed)
        except BaseException:
            for _, coroutine in waiting.values():
                getattr(coroutine, "close", lambda: None)()
            raise
        for (one, _), outcome in zip(waiting.values(), _together(waiting.values()), strict=True):
            columns[one.name] = self._settled(one, outcome, None, failed)
        return columns

    def _run_apart(
        self, one: _Call, worker: Worker, given_up: threading.Event, failed: MutableMapping[str, int]
    ) -> np.ndarray:
        """Run a function in its worker."""
        place, sent = place_of(one.name, one.function), portable(one.name, one.arguments)

        def attempt(part: Sequence[int]) -> Outcome:
            return worker.call(place, _part(sent, part), len(part), self.safety.timeout, given_up)

        return self._settled(one, attempt(range(len(one.samples))), attempt, failed)

    def _home(self, name: str) -> Worker:
        """Return the function's worker, always the same one, so that state kept between calls is available there."""
        with self._lock:
            return self._homes.setdefault(name, self._workers[len(self._homes) % len(self._workers)])

    def _settled(
        self, one: _Call, outcome: Outcome, attempt: Attempt | None, failed: MutableMapping[str, int]
    ) -> np.ndarray:
        """Return the values of a function, with failed ones replaced according to its policy."""
        policy, everyone = self.policy(one.name), range(len(one.samples))
        if policy == "raise" and (outcome.failure or outcome.wrong):
            raise self._error(one, outcome, attempt) from (outcome.failure.error if outcome.failure else None)
        values, lost, about = outcome.values, sorted(outcome.wrong), outcome
        if outcome.failure:
            guilty = [] if attempt is None else list(_search(outcome, attempt, everyone, same=False))
            values, lost = _without(guilty, attempt, everyone)
            about = replace(outcome, failure=replace(outcome.failure, sample=guilty[0])) if guilty else outcome
        if policy != "raise":
            self._count(one, about, lost, failed)
        assert values is not None
        values[lost] = np.nan if policy == "none" else self.safety.value
        return values

    def _error(self, one: _Call, outcome: Outcome, attempt: Attempt | None) -> RewardError:
        """Build the error about the first completion for which the function fails in this way."""
        failure = outcome.failure
        if failure and attempt and failure.sample is None:
            guilty = _search(outcome, attempt, range(len(one.samples)), same=True)
            outcome = replace(outcome, failure=replace(failure, sample=next(guilty, None)))
        return _told(one, outcome)

    def _count(self, one: _Call, outcome: Outcome, lost: Sequence[int], failed: MutableMapping[str, int]) -> None:
        """Count failures, report the first one of a function, and raise when there are more than the budget allows."""
        with self._lock:
            failed[one.name] += len(lost)
            self.failed[one.name] += len(lost)
            new, spent = bool(lost) and one.name not in self._said, sum(self.failed.values())
            self._said |= {one.name} if lost else set()
        if spent > self.safety.budget and lost:
            raise self._over(one, outcome)
        if new:
            instead = "not scored by it" if self.policy(one.name) == "none" else f"given {self.safety.value:g}"
            first = _told(one, outcome)
            place = f"{first.where}: " if first.where else ""
            fix = f" ({first.fix})" if first.fix else ""
            self._say(
                f"{place}{first.what}; such samples are {instead}, and rewards/{one.name}/failed counts them{fix}"
            )

    def _over(self, one: _Call, outcome: Outcome) -> RewardError:
        by = ", ".join(f"{name} {count}" for name, count in self.failed.items() if count)
        last = _told(one, outcome)
        what = f"{sum(self.failed.values())} failures of reward functions ({by}), the last: {last.what}"
        fix = "mend the function; or a larger reward_safety.budget"
        return RewardError(what, want=f"at most {self.safety.budget} in a run", fix=fix, where=last.where)


def _told(one: _Call, outcome: Outcome) -> RewardError:
    if (failure := outcome.failure) is not None:
        return told(one.name, failure.what, failure.sample, one.samples, failure)
    first = min(outcome.wrong)
    return told(one.name, f"gave {outcome.wrong[first]}", first, one.samples)


def _search(outcome: Outcome, attempt: Attempt, part: Sequence[int], same: bool) -> Iterator[int]:
    """Find the completions of `part` for which a function fails even alone, after it failed for the whole part.

    There is no search when the result had the wrong shape, since it might fit a smaller call by accident, or when the
    function took long to raise, since a judge that timed out would time out many times.

    Args:
        same: find only those for which it fails in the same way.
    """
    failure, lost = outcome.failure, 0
    assert failure is not None
    if failure.sort == MISSHAPEN or (failure.sort != LOST and outcome.seconds >= SEARCH_SECONDS):
        return iter(())

    def fails(some: Sequence[int]) -> bool:
        nonlocal lost
        if lost >= MOST_LOST:
            return False
        found = attempt(some).failure
        lost += found is not None and found.sort == LOST
        return found is not None and (not same or found.like(failure))

    return _halved(fails, part)


def _halved(fails: Callable[[Sequence[int]], bool], part: Sequence[int]) -> Iterator[int]:
    if len(part) == 1:
        yield part[0]
        return
    middle = len(part) // 2
    for half in (part[:middle], part[middle:]):
        if fails(half):
            yield from _halved(fails, half)


def _without(guilty: Sequence[int], attempt: Attempt | None, part: Sequence[int]) -> tuple[np.ndarray, list[int]]:
    """Score again without the guilty completions; return all values and the indices of the completions without one.

    No completion has a value when the call still fails or when no completion is guilty alone.
    """
    values, rest = np.full(len(part), np.nan), [i for i in part if i not in set(guilty)]
    if attempt is None or not guilty or not rest:
        return values, list(part)
    outcome = attempt(rest)
    if outcome.values is None:
        return values, list(part)
    values[rest] = outcome.values
    return values, sorted([*guilty, *(rest[i] for i in outcome.wrong)])


def _here(one: _Call) -> Attempt:
    """Return an attempt in this process, with fresh argument lists, as the function may have modified the old ones."""

    def attempt(part: Sequence[int]) -> Outcome:
        arguments = _part(taken(one.name, one.function, one.samples), part)
        with exits.refused():
            outcome = call(one.function, arguments, len(part))
        if isinstance(outcome, Outcome):
            return outcome
        getattr(outcome, "close", lambda: None)()
        return Outcome(np.zeros(len(part)))

    return attempt


def _part(arguments: Mapping[str, list[Any]], part: Sequence[int]) -> dict[str, list[Any]]:
    return {key: [values[i] for i in part] for key, values in arguments.items()}


def _together(waiting: Iterable[tuple[_Call, Awaitable[Any]]]) -> list[Outcome]:
    """Await async functions concurrently in a thread and return their outcomes.

    An exit in one of their tasks ends the event loop and becomes the outcome of all unfinished functions.
    """
    waiting = list(waiting)
    if not waiting:
        return []

    import asyncio  # imported late: it would noticeably delay the command's error about a typo

    outcomes: dict[str, Outcome] = {}

    async def settle(one: _Call, result: Awaitable[Any]) -> None:
        outcomes[one.name] = await finished(result, len(one.samples))

    async def gathered() -> None:
        await asyncio.gather(*(settle(one, result) for one, result in waiting))

    def run() -> list[Outcome]:
        try:
            with exits.refused():
                asyncio.run(gathered())
        except SystemExit as error:  # the loop has cancelled the pending tasks
            for one, _ in waiting:
                failure = outcomes[one.name].failure if one.name in outcomes else None
                if one.name not in outcomes or (failure and isinstance(failure.error, asyncio.CancelledError)):
                    outcomes[one.name] = raised(error)
        return [outcomes[one.name] for one, _ in waiting]

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def _results(futures: Mapping[str, "Future[np.ndarray]"]) -> dict[str, np.ndarray]:
    """Collect results in order, so that of several errors always the same one is raised."""
    return {name: future.result() for name, future in futures.items()}
