"""Reduce a series to a number of points that a page can hold, without losing its extremes.

The steps are cut into equal ranges, and each range keeps its lowest and its highest value at their own steps, so that a
spike of one step stays visible; an average would hide it. Every point that is kept is a row of the file.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from covey.report.run_data import Series

MAX_VALUES = 200_000
"""Maximum number of values of all series of a page: about 1.5 MB."""
MIN_POINTS = 100
"""Number of points that a series keeps at least, however many runs and metrics there are."""


def points_per_series(count: int, longest: int) -> int:
    """Return how many points each of `count` series may have, the longest of which has `longest`.

    >>> points_per_series(60, 2000), points_per_series(60, 100_000)
    (2000, 3333)
    """
    return max(MIN_POINTS, min(longest, MAX_VALUES // max(count, 1)))


def reduce_series(series: Series, limit: int) -> Series:
    """Return at most about `limit` points of `series`: the first, the last, and the extremes of each range of steps.

    >>> reduce_series(Series(range(8), [0, 0, 9, 0, 0, 0, -9, 0]), 6).values
    [0, 9, 0, -9, 0]
    """
    if len(series.values) <= limit:
        return series
    kept = extremes(series.values, max(1, (limit - 2) // 2))
    return Series([series.steps[i] for i in kept], [series.values[i] for i in kept])


def extremes(values: Sequence[float], ranges: int) -> list[int]:
    """Return the ascending indices of the first and the last value and of the lowest and highest of each range."""
    array = np.asarray(values, np.float64)
    edges = np.unique(np.linspace(0, len(array), ranges + 1).astype(int))
    found = {0, len(array) - 1}
    for start, stop in pairwise(edges.tolist()):
        found |= {start + int(array[start:stop].argmin()), start + int(array[start:stop].argmax())}
    return sorted(found)


def spread(count: int, limit: int) -> list[int]:
    """Return at most `limit` of `count` positions, evenly spaced, the first and the last among them.

    >>> spread(9, 3), spread(2, 5), spread(5, 1)
    ([0, 4, 8], [0, 1], [0])
    """
    if count <= limit:
        return list(range(count))
    return sorted({round(i * (count - 1) / max(1, limit - 1)) for i in range(limit)})


def coarse_to_fine(count: int) -> Iterator[int]:
    """Yield 0 to count − 1: the first, the last, then the middle of each gap, so that any beginning is spread evenly.

    >>> list(coarse_to_fine(5))
    [0, 4, 2, 1, 3]
    """
    yield from range(min(count, 1))
    if count > 1:
        yield count - 1
    gaps = [(0, count - 1)]
    for first, last in gaps:
        if last - first > 1:
            middle = (first + last) // 2
            yield middle
            gaps += [(first, middle), (middle, last)]
