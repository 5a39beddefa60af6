"""The arithmetic task: sums to 20 and products of digits, answered with the number alone.

A third of the problems is held out, a + b together with b + a: no test problem is trained on in either order.
The problems shown in the prompt as examples are in neither set.
"""

import random
from collections.abc import Iterator
from typing import Any

SYSTEM = "Answer with the number only."

FEW_SHOT = (("+", 4, 3), ("×", 2, 5))
"""Problems that every prompt shows with their answers."""

TEST_FRACTION = 1 / 3
"""Share of the problems that only the test set has."""


def make_rows(seed: int, level: str = "mixed") -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return training and test rows (`prompt`, `answer`, `operation`); the seed picks which problems are held out.

    Args:
        level: a key of `LEVELS`.
    """
    rng = random.Random(seed)
    train: list[dict[str, Any]] = []
    test: list[dict[str, Any]] = []
    for operation in LEVELS[level]:
        problems = [p for p in _problems(operation) if (operation, *p) not in _few_shot_problems()]
        rng.shuffle(problems)
        cut = round(len(problems) * TEST_FRACTION)
        test += [row for p in problems[:cut] for row in _both_orders(operation, *p)]
        train += [row for p in problems[cut:] for row in _both_orders(operation, *p)]
    rng.shuffle(test)
    return train, test


def solve(operation: str, a: int, b: int) -> int:
    """Return the answer to a problem.

    >>> solve("×", 7, 8)
    56
    """
    return a + b if operation == "+" else a * b


def _problems(operation: str) -> list[tuple[int, int]]:
    """Return the pairs with a ≤ b: every sum up to 20, or every product of two digits."""
    top = 20 if operation == "+" else 9
    return [(a, b) for a in range(top + 1) for b in range(a, top + 1) if operation == "×" or a + b <= top]


def _few_shot_problems() -> set[tuple[str, int, int]]:
    return {(operation, min(a, b), max(a, b)) for operation, a, b in FEW_SHOT}


def _both_orders(operation: str, a: int, b: int) -> Iterator[dict[str, Any]]:
    for left, right in {(a, b): None, (b, a): None}:
        yield {
            "prompt": _prompt(operation, left, right),
            "answer": str(solve(operation, left, right)),
            "operation": operation,
        }


def _prompt(operation: str, a: int, b: int) -> list[dict[str, str]]:
    turns: list[dict[str, str]] = []
    for shown in FEW_SHOT:
        turns += [{"role": "user", "content": _question(*shown)}, {"role": "assistant", "content": str(solve(*shown))}]
    return [*turns, {"role": "user", "content": _question(operation, a, b)}]


def _question(operation: str, a: int, b: int) -> str:
    return f"What is {a} {operation} {b}?"


LEVELS: dict[str, tuple[str, ...]] = {"sums": ("+",), "products": ("×",), "mixed": ("+", "×")}
"""Operations of each level."""
