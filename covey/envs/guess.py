"""Number guessing: the model guesses a whole number, and the environment answers whether it is higher or lower.

The data row has the number, and a prompt that names the range (`data.guess`). In a chat the answers are sentences.
After plain text they are single characters, for models from scratch: `20-50:` `35` `>` `42` `<` `38` `=`.
"""

import re
from collections.abc import Mapping
from typing import Any

from covey.envs.protocol import Step
from covey.types import Prompt

HIGHER, LOWER, RIGHT, NO_NUMBER = range(4)
SENTENCES = ("Higher.", "Lower.", "Right!", "That is no number.")
CHARACTERS = (">", "<", "=", "?")


class Guess:
    """A game for one number: the reward is 1 when it is found. A reply that is no number ends the game."""

    def __init__(self, row: Mapping[str, Any]):
        self.prompt: Prompt = row["prompt"]
        self.number = int(row["number"])
        self.answers = CHARACTERS if isinstance(self.prompt, str) else SENTENCES

    def reset(self) -> Prompt:
        """Return the row's prompt."""
        return self.prompt

    def step(self, reply: str) -> Step:
        """Compare the reply with the number."""
        found = re.fullmatch(r"\s*(\d{1,9})\s*\.?\s*", reply)
        if found is None:
            return Step(self.answers[NO_NUMBER], done=True)
        guess = int(found[1])
        if guess == self.number:
            return Step(self.answers[RIGHT], reward=1.0, done=True)
        return Step(self.answers[HIGHER if self.number > guess else LOWER])
