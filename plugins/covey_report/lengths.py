"""Histogram and statistics of lengths in tokens, against a limit."""

from typing import NamedTuple

import numpy as np

BINS = 16
"""Number of bars of a histogram that is aimed at."""


class Limit(NamedTuple):
    """Limit of a run.

    Attributes:
        tokens: largest number of tokens.
        setting: name of the setting.
        policy: what happens to longer rows: error, drop or truncate.
    """

    tokens: int
    setting: str
    policy: str


class Bar(NamedTuple):
    """Rows of `first` to `last` tokens, and how many of them are longer than the limit."""

    first: int
    last: int
    rows: int
    over: int


class Lengths(NamedTuple):
    """Statistics of the lengths of rows, in tokens.

    Attributes:
        measured: number of rows measured.
        mean, median, p99, longest: mean, quantiles and maximum.
        over: number of measured rows that are longer than the limit.
        bars: the histogram; its last bar has everything beyond the others.
    """

    measured: int
    mean: float
    median: float
    p99: float
    longest: int
    over: int
    bars: list[Bar]


def describe_lengths(counts: np.ndarray, limit: int) -> Lengths | None:
    """Describe numbers of tokens, int64 [n]; None if there are none."""
    if not counts.size:
        return None
    median, p99 = np.quantile(counts, [0.5, 0.99])
    over, longest = int((counts > limit).sum()), int(counts.max())
    mean = round(float(counts.mean()), 1)
    return Lengths(counts.size, mean, float(median), float(p99), longest, over, _bars(counts, limit, float(p99)))


def _bars(counts: np.ndarray, limit: int, p99: float) -> list[Bar]:
    """Return about `BINS` bars of equal width up to a little beyond the 99th percentile."""
    low, longest = int(counts.min()), int(counts.max())
    top = min(longest, max(int(1.5 * p99), low))
    width = _round_up(max(1, -(-(top - low + 1) // BINS)))
    begin = low // width * width
    edges = [*range(begin, top + 1, width), max(longest + 1, begin + width)]
    if len(edges) > 2 and edges[-1] - edges[-2] < width:
        edges[-1] = edges[-2] + width
    rows, over = (np.histogram(part, edges)[0].tolist() for part in (counts, counts[counts > limit]))
    return [Bar(a, b - 1, n, m) for a, b, n, m in zip(edges, edges[1:], rows, over, strict=False)]


def _round_up(width: int) -> int:
    """Round a width up to 1, 2 or 5 times a power of ten.

    >>> _round_up(1), _round_up(3), _round_up(11)
    (1, 5, 20)
    """
    power: int = 10 ** (len(str(width)) - 1)
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= width)
