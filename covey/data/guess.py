"""The guess task: games in which a number in a range is found by higher and lower; `20-50:` names the range.

Ranges have 25 to 31 numbers, so five guesses are enough for the best strategy, which halves what is left. A fifth of
the ranges is held out: no test game has the range of a training game.
"""

import random
from collections.abc import Iterator
from typing import Any

NUMBERS = range(10, 100)
"""Numbers that occur."""

SIZES = range(25, 32)
"""Numbers of numbers in a range."""

TEST_FRACTION = 1 / 5
"""Share of the ranges that only the test set has."""

GAMES_PER_RANGE = 6
"""Number of games in the test set for each of its ranges."""

MAX_GUESSES = 5
"""Number of guesses in a game of `make_games`."""

END = "<eos>"
"""Token that ends a turn, of the models from scratch."""


def make_rows(seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return training and test rows (`prompt`, `number`, `low`, `high`); the seed picks which ranges are held out."""
    rng = random.Random(seed)
    ranges = [range(low, low + size) for size in SIZES for low in NUMBERS if low + size - 1 in NUMBERS]
    rng.shuffle(ranges)
    cut = round(len(ranges) * TEST_FRACTION)
    test = [_row(numbers, number) for numbers in ranges[:cut] for number in rng.sample(numbers, GAMES_PER_RANGE)]
    train = [_row(numbers, number) for numbers in ranges[cut:] for number in numbers]
    rng.shuffle(test)
    return train, test


def make_games(seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows with whole games as the completions to learn, of a player who follows the answers but guesses any
    number that is left. They are text in which each guess ends with the end of a turn, and the answer follows.
    """
    rng, (train, test) = random.Random(seed), make_rows(seed)
    return [_with_game(row, rng) for row in train], [_with_game(row, rng) for row in test]


def _row(numbers: range, number: int) -> dict[str, Any]:
    low, high = numbers[0], numbers[-1]
    return {"prompt": f"{low}-{high}:", "number": number, "low": low, "high": high}


def _with_game(row: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    return {**row, "completion": "".join(_turns(row["low"], row["high"], row["number"], rng))}


def _turns(low: int, high: int, number: int, rng: random.Random) -> Iterator[str]:
    """Yield guesses with their ends, and the answers between them."""
    for turn in range(MAX_GUESSES):
        guess = rng.randint(low, high)
        yield f"{guess}{END}"
        if guess == number or turn == MAX_GUESSES - 1:
            return
        yield ">" if number > guess else "<"
        low, high = (guess + 1, high) if number > guess else (low, guess - 1)
