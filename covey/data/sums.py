"""The sums task, for the smallest models: sums of two two-digit numbers as plain text; `17+25=` is completed by `42`.

Sums stay below 100, so that every problem has the same form. A fifth of the pairs is held out, a + b together with
b + a: no test problem is trained on in either order.
"""

import random
from collections.abc import Iterator
from typing import Any

NUMBERS = range(10, 90)
"""Numbers that are added."""

SUM_LIMIT = 100
"""Exclusive upper bound of the sums."""

TEST_FRACTION = 1 / 5
"""Share of the pairs that only the test set has."""


def make_rows(seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return training and test rows (`prompt`, `answer`); the seed picks which pairs are held out."""
    rng = random.Random(seed)
    pairs = [(a, b) for a in NUMBERS for b in NUMBERS if a <= b and a + b < SUM_LIMIT]
    rng.shuffle(pairs)
    cut = round(len(pairs) * TEST_FRACTION)
    test, train = ([row for pair in part for row in _both_orders(*pair)] for part in (pairs[:cut], pairs[cut:]))
    rng.shuffle(test)
    return train, test


def _both_orders(a: int, b: int) -> Iterator[dict[str, Any]]:
    for left, right in {(a, b): None, (b, a): None}:
        yield {"prompt": f"{left}+{right}=", "answer": str(left + right)}
