"""Tasks with numbers. No problem of a test is trained on in either order: a + b and b + a are held out together.

arithmetic   sums to 20 and products of digits in a chat, answered with the number alone; a third is held out
sums         for the smallest models: `17+25=` is completed by `42`, always two digits; a fifth is held out
"""

import random

from covey.data.rows import Row, chat

SYSTEM = "Answer with the number only."

FEW_SHOT = (("+", 4, 3), ("×", 2, 5))
"""Problems that every prompt of arithmetic shows with their answers."""

TEST_FRACTION, SUMS_TEST_FRACTION = 1 / 3, 1 / 5
"""Shares of the problems of arithmetic and of sums that only the test set has."""

SUMS_NUMBERS, SUM_LIMIT = range(10, 90), 100
"""Numbers that are added in sums, and the exclusive upper bound of the result."""


def make_rows(seed: int) -> tuple[list[Row], list[Row]]:
    """Make training and test rows of arithmetic (`prompt`, `answer`, `operation`); the seed picks those held out."""
    rng = random.Random(seed)
    train: list[Row] = []
    test: list[Row] = []
    shown = {(operation, *sorted(pair)) for operation, *pair in FEW_SHOT}
    for operation in "+×":
        problems = [pair for pair in _problems(operation) if (operation, *pair) not in shown]
        rng.shuffle(problems)
        cut = round(len(problems) * TEST_FRACTION)
        test += [_row(operation, *pair) for pair in _both_orders(problems[:cut])]
        train += [_row(operation, *pair) for pair in _both_orders(problems[cut:])]
    rng.shuffle(test)
    return train, test


def solve(operation: str, a: int, b: int) -> int:
    """Return the answer to a problem.

    >>> solve("×", 7, 8)
    56
    """
    return a + b if operation == "+" else a * b


def make_sums(seed: int) -> tuple[list[Row], list[Row]]:
    """Make training and test rows of sums (`prompt`, `answer`); the seed picks the held-out pairs."""
    rng = random.Random(seed)
    pairs = [(a, b) for a in SUMS_NUMBERS for b in SUMS_NUMBERS if a <= b and a + b < SUM_LIMIT]
    rng.shuffle(pairs)
    cut = round(len(pairs) * SUMS_TEST_FRACTION)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in _both_orders(pairs[:cut])]
    rng.shuffle(rows)
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in _both_orders(pairs[cut:])], rows


def _problems(operation: str) -> list[tuple[int, int]]:
    """Return the pairs with a ≤ b: every sum up to 20, or every product of two digits."""
    top = 20 if operation == "+" else 9
    return [(a, b) for a in range(top + 1) for b in range(a, top + 1) if operation == "×" or a + b <= top]


def _both_orders(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [order for a, b in pairs for order in dict.fromkeys([(a, b), (b, a)])]


def _row(operation: str, a: int, b: int) -> Row:
    shown = [text for problem in FEW_SHOT for text in (question(*problem), str(solve(*problem)))]
    return {
        "prompt": chat(*shown, question(operation, a, b)),
        "answer": str(solve(operation, a, b)),
        "operation": operation,
    }


def question(operation: str, a: int, b: int) -> str:
    """Return a problem as a question."""
    return f"What is {a} {operation} {b}?"
