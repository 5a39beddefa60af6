"""Word guessing as in Wordle: the model guesses a word, and the environment marks each of its letters.

The data row has the word, and a prompt (`data.wordle`). After plain text the marks are characters, for models from
scratch: `?` `abc` `-~+` `dbc`. In a chat they are spelled out: `a is not in the word, b is elsewhere, c is right.`
"""

import re
from collections.abc import Mapping
from typing import Any

from covey.data.wordle import ABSENT, ELSEWHERE, RIGHT, mark_letters
from covey.envs.protocol import Step
from covey.types import Prompt

MEANINGS = {RIGHT: "right", ELSEWHERE: "elsewhere", ABSENT: "not in the word"}


class Wordle:
    """A game for one word. The word pays 1; a reply that is no word of its length ends the game."""

    def __init__(self, row: Mapping[str, Any]):
        self.prompt: Prompt = row["prompt"]
        self.word = str(row["word"]).lower()

    def reset(self) -> Prompt:
        """Return the row's prompt."""
        return self.prompt

    def step(self, reply: str) -> Step:
        """Compare the reply with the word."""
        guess = reply.strip().rstrip(".").lower()
        if len(guess) != len(self.word) or not re.fullmatch(r"\w+", guess):
            return Step(done=True)
        marks = mark_letters(self.word, guess)
        shown = marks if isinstance(self.prompt, str) else spell_out(guess, marks)
        found = guess == self.word
        return Step(shown, reward=float(found), done=found)


def spell_out(guess: str, marks: str) -> str:
    """Return the marks of a guess as a sentence.

    >>> spell_out("abc", "-~+")
    'a is not in the word, b is elsewhere, c is right.'
    """
    return ", ".join(f"{letter} is {MEANINGS[mark]}" for letter, mark in zip(guess, marks, strict=True)) + "."
