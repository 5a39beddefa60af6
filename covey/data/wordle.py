"""The wordle task: words of three different letters from `a` to `h`, to be found by the marks of guesses.

A fifth of the words is held out: no test game has the word of a training game, though players guess such words too.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import permutations
from typing import Any

from covey.data.guess import END

WORDS = tuple("".join(letters) for letters in permutations("abcdefgh", 3))
"""Words that occur: 336."""

TEST_FRACTION = 1 / 5
"""Share of the words that only the test set has."""

GAMES_PER_WORD = 40
"""Number of training games of `make_games` for each word."""

MAX_GUESSES = 5
"""Number of guesses in a game of `make_games`."""

PROMPT = "?"

RIGHT, ELSEWHERE, ABSENT = "+", "~", "-"
"""Marks of a letter of a guess."""


def make_rows(seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return training and test rows (`prompt`, `word`); the seed picks which words are held out."""
    words = random.Random(seed).sample(WORDS, len(WORDS))
    cut = round(len(words) * TEST_FRACTION)
    test, train = ([{"prompt": PROMPT, "word": word} for word in part] for part in (words[:cut], words[cut:]))
    return train, test


def make_games(seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return rows with whole games as the completions to learn, of a player who heeds the marks of the last guess and
    has forgotten those before. They are text in which each guess ends with the end of a turn, and the marks follow.
    """
    rng, (train, test) = random.Random(seed), make_rows(seed)
    return [_with_game(row, rng) for row in train for _ in range(GAMES_PER_WORD)], [
        _with_game(row, rng) for row in test
    ]


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


def _with_game(row: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    return {**row, "completion": "".join(_turns(row["word"], rng))}


def _turns(word: str, rng: random.Random) -> Iterator[str]:
    """Yield guesses with their ends, and the marks between them."""
    left: Sequence[str] = WORDS
    for turn in range(MAX_GUESSES):
        guess = rng.choice(left)
        yield f"{guess}{END}"
        if guess == word or turn == MAX_GUESSES - 1:
            return
        marks = mark_letters(word, guess)
        yield marks
        left = _words_by_marks(guess)[marks]


@cache
def _words_by_marks(guess: str) -> Mapping[str, Sequence[str]]:
    found = defaultdict(list)
    for word in WORDS:
        found[mark_letters(word, guess)].append(word)
    return found
