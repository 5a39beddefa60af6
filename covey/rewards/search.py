"""Find the completions for which a reward function fails, so that the others keep their values.

The batch is bisected. There is no search when the result was malformed, since it might fit a smaller call by accident,
or when the function took long to raise, since a judge that timed out would time out many times.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from covey.rewards.call import LOST, MALFORMED, Outcome

SEARCH_SECONDS = 1.0
"""A function that raised in less time is called again with fewer completions, to find those for which it fails."""
MAX_LOST = 16
"""Maximum number of workers that may be lost in such a search."""

Attempt = Callable[[Sequence[int]], Outcome]
"""Callable that calls a function on some of its completions, given by index."""


def find_failing(outcome: Outcome, attempt: Attempt | None, count: int, same: bool) -> Iterator[int]:
    """Yield the completions for which a function fails even alone, after it failed with `outcome` for all `count`.

    Args:
        attempt: None when the function cannot be called again.
        same: find only those for which it fails in the same way.
    """
    failure, lost = outcome.failure, 0
    if failure is None or attempt is None or failure.kind == MALFORMED:
        return iter(())
    if failure.kind != LOST and outcome.seconds >= SEARCH_SECONDS:
        return iter(())

    def fails(part: Sequence[int]) -> bool:
        nonlocal lost
        if lost >= MAX_LOST:
            return False
        found = attempt(part).failure
        lost += found is not None and found.kind == LOST
        return found is not None and (not same or found.is_like(failure))

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
