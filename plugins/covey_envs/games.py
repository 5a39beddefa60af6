"""Built-in games: number guessing and Wordle.

Guess: the model guesses a whole number, and the environment answers whether it is higher or lower. The data row has the
number, and a prompt that names the range (`game_rows`). In a chat the answers are sentences. After plain text they are
single characters, for models from scratch: `20-50:` `35` `>` `42` `<` `38` `=`.

Wordle: the model guesses a word, and the environment marks each of its letters. The data row has the word, and a prompt
(`game_rows`). After plain text the marks are characters: `?` `abc` `-~+` `dbc`. In a chat they are spelled out:
`a is not in the word, b is elsewhere, c is right.`
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from covey.types import Prompt
from covey_envs import game_rows
from covey_envs.protocol import Step

HIGHER, LOWER, RIGHT, NO_NUMBER = range(4)
SENTENCES = ("Higher.", "Lower.", "Right!", "That is no number.")
CHARACTERS = (">", "<", "=", "?")
MEANINGS = {game_rows.RIGHT: "right", game_rows.ELSEWHERE: "elsewhere", game_rows.ABSENT: "not in the word"}


class Guess:
    """A game for one number. A reply that is no number ends it.

    The rewards of a game that finds the number add up to 1. If the row has the range (`low`, `high`), half of that is
    earned on the way: each guess by what it excludes at least, whatever the number is: log(left before / larger part of
    what is left after) / log(all). So luck pays only where it finds the number.
    """

    def __init__(self, row: Mapping[str, Any]):
        self.prompt: Prompt = row["prompt"]
        self.number, self.earned = int(row["number"]), 0.0
        self.left = range(row["low"], row["high"] + 1) if "low" in row else range(0)
        self.size = len(self.left)
        self.answers = CHARACTERS if isinstance(self.prompt, str) else SENTENCES

    def reset(self) -> Prompt:
        """Return the row's prompt."""
        return self.prompt

    def step(self, reply: str) -> Step:
        """Compare the reply with the number."""
        match = re.fullmatch(r"\d{1,9}", reply.strip().removesuffix(".").rstrip())
        if match is None:
            return Step(self.answers[NO_NUMBER], reward=0.0, done=True)
        guess = int(match[0])
        if guess == self.number:
            return Step(self.answers[RIGHT], reward=1.0 - self.earned, done=True)
        reward = self._exclude(guess)
        self.earned += reward
        return Step(self.answers[HIGHER if self.number > guess else LOWER], reward=reward)

    def _exclude(self, guess: int) -> float:
        """Exclude the numbers that the answer to `guess` excludes; return the reward."""
        if guess not in self.left:
            return 0.0
        before, lower, higher = len(self.left), range(self.left.start, guess), range(guess + 1, self.left.stop)
        self.left = higher if self.number > guess else lower
        return 0.5 * math.log(before / max(len(lower), len(higher))) / math.log(self.size)


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
            return Step(reward=0.0, done=True)
        marks = game_rows.mark_letters(self.word, guess)
        answer = marks if isinstance(self.prompt, str) else spell_out(guess, marks)
        return Step(answer, reward=float(guess == self.word), done=guess == self.word)


def spell_out(guess: str, marks: str) -> str:
    """Spell out the marks of a guess as a sentence.

    >>> spell_out("abc", "-~+")
    'a is not in the word, b is elsewhere, c is right.'
    """
    return ", ".join(f"{letter} is {MEANINGS[mark]}" for letter, mark in zip(guess, marks, strict=True)) + "."
