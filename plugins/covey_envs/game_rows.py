"""Games of several turns: a number in a range, found by higher and lower, and a word, found by the marks of guesses.

    guess    `20-50:` names a range of 25 to 31 numbers: five guesses are enough for who halves what is left. A fifth of
             the ranges is held out: no test game has the range of a training game.
    wordle   Words of three different letters from `a` to `h`. A fifth of them is held out: no test game has the word of
             a training game, though players guess such words too.

Games to learn are text in which each guess ends with the end of a turn, and the answer follows. Their player heeds the
last answer but guesses anything that it leaves; in wordle the player has forgotten the answers before.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import permutations
from typing import Any

from covey.data.rows import Row
from covey.data.sources import Task

NUMBERS, SIZES = range(10, 100), range(25, 32)
"""Numbers that occur in guess, and numbers of numbers in a range."""

WORDS = tuple("".join(letters) for letters in permutations("abcdefgh", 3))
"""Words that occur in wordle: 336."""

TEST_FRACTION = 1 / 5
"""Share of the ranges, and of the words, that only the test set has."""

GAMES_PER_RANGE, GAMES_PER_WORD = 6, 40
"""Number of test games of guess for each range, and of training games to learn of wordle for each word."""

MAX_GUESSES = 5
"""Number of guesses in a game to learn."""

END = "<eos>"
"""Token that ends a turn, of the models from scratch."""

RIGHT, ELSEWHERE, ABSENT = "+", "~", "-"
"""Marks of a letter of a guess."""


def make_ranges(seed: int) -> tuple[list[Row], list[Row]]:
    """Make training and test rows of guess (`prompt`, `number`, `low`, `high`); the seed picks the held-out ranges."""
    rng = random.Random(seed)
    ranges = [range(low, low + size) for size in SIZES for low in NUMBERS if low + size - 1 in NUMBERS]
    rng.shuffle(ranges)
    cut = round(len(ranges) * TEST_FRACTION)
    test = [_range_row(numbers, number) for numbers in ranges[:cut] for number in rng.sample(numbers, GAMES_PER_RANGE)]
    rng.shuffle(test)
    return [_range_row(numbers, number) for numbers in ranges[cut:] for number in numbers], test


def make_words(seed: int) -> tuple[list[Row], list[Row]]:
    """Make training and test rows of wordle (`prompt`, `word`); the seed picks the held-out words."""
    rows = [{"prompt": "?", "word": word} for word in random.Random(seed).sample(WORDS, len(WORDS))]
    cut = round(len(rows) * TEST_FRACTION)
    return rows[cut:], rows[:cut]


def make_range_games(seed: int) -> tuple[list[Row], list[Row]]:
    """Make the rows of guess with games to learn as their completions."""
    rng, (train, test) = random.Random(seed), make_ranges(seed)
    games = [
        [{**row, "completion": _play(row["number"], range(row["low"], row["high"] + 1), _compare, rng)} for row in part]
        for part in (train, test)
    ]
    return games[0], games[1]


def make_word_games(seed: int) -> tuple[list[Row], list[Row]]:
    """Make the rows of wordle with games to learn as their completions."""
    rng, (train, test) = random.Random(seed), make_words(seed)
    parts = [row for row in train for _ in range(GAMES_PER_WORD)], test
    games = [[{**row, "completion": _play(row["word"], WORDS, _mark, rng)} for row in part] for part in parts]
    return games[0], games[1]


def mark_letters(word: str, guess: str) -> str:
    """Return the mark of each letter of a guess; a letter is elsewhere as often as the word has it in other places.

    >>> mark_letters("crane", "caper"), mark_letters("abbey", "babel")
    ('+~-~~', '~~++-')
    """
    left = Counter(letter for letter, said in zip(word, guess, strict=True) if letter != said)
    marks = []
    for letter, said in zip(word, guess, strict=True):
        elsewhere = said != letter and left[said] > 0
        left[said] -= elsewhere
        marks.append(RIGHT if said == letter else ELSEWHERE if elsewhere else ABSENT)
    return "".join(marks)


def _range_row(numbers: range, number: int) -> Row:
    low, high = numbers[0], numbers[-1]
    return {"prompt": f"{low}-{high}:", "number": number, "low": low, "high": high}


Respond = Callable[[Any, Any, Any], tuple[str, Sequence[Any]]]
"""Function from the target, a guess and the values that were left to the answer and the values that it leaves."""


def _play(target: Any, left: Sequence[Any], respond: Respond, rng: random.Random) -> str:
    """Play a game to learn: guess values that are left until `target` is found or no guess is left."""
    text = ""
    for turn in range(MAX_GUESSES):
        guess = rng.choice(left)
        text += f"{guess}{END}"
        if guess == target or turn == MAX_GUESSES - 1:
            break
        answer, left = respond(target, guess, left)
        text += answer
    return text


def _compare(number: int, guess: int, left: range) -> tuple[str, range]:
    return (">", range(guess + 1, left.stop)) if number > guess else ("<", range(left.start, guess))


def _mark(word: str, guess: str, left: Sequence[str]) -> tuple[str, Sequence[str]]:
    marks = mark_letters(word, guess)
    return marks, _words_by_marks(guess)[marks]


@cache
def _words_by_marks(guess: str) -> Mapping[str, Sequence[str]]:
    words = defaultdict(list)
    for word in WORDS:
        words[mark_letters(word, guess)].append(word)
    return words


GUESS = Task(lambda config: make_ranges(config.seed), lambda config: make_range_games(config.seed))
WORDLE = Task(lambda config: make_words(config.seed), lambda config: make_word_games(config.seed))
