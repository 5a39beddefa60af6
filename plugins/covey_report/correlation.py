"""Correlation of two values of completions within their groups."""

from collections.abc import Sequence

import numpy as np

from covey.losses.advantages import EQUALITY_TOLERANCE


def labels_of(sizes: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the number of the group of each completion, int [B], given their sizes; 0 where no group has two."""
    return np.repeat(np.arange(len(sizes)), sizes) * int(max(sizes, default=0) > 1)


def centre(values: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return values [B] less the mean of those with the same label; 0 for NaN and for differences that are rounding."""
    known, values = ~np.isnan(values), np.nan_to_num(values)
    counts, sizes = np.bincount(labels, known), np.zeros(labels.max(initial=-1) + 1)
    np.maximum.at(sizes, labels, np.abs(values))
    means = np.bincount(labels, values) / np.maximum(counts, 1)
    centred = np.where(known, values - means[labels], 0.0)
    rounding = (EQUALITY_TOLERANCE + counts * np.finfo(float).eps) * sizes  # of equal values, and of their sum
    return np.where(np.abs(centred) > rounding[labels], centred, 0.0)


def correlate(first: np.ndarray, second: np.ndarray, labels: np.ndarray) -> float | None:
    """Return the correlation within groups of two values [B] of the completions that have both; None if one of them
    does not vary there.
    """
    unknown = np.isnan(first) | np.isnan(second)
    x, y = (centre(np.where(unknown, np.nan, values), labels) for values in (first, second))
    return float(np.clip(x @ y / np.sqrt((x @ x) * (y @ y)), -1, 1)) if x.any() and y.any() else None
