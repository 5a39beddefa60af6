"""Reward functions and environments of the runs, most of them wrong on purpose.

Those that draw or remember keep their state in this module: a run in another process begins anew.
"""

import random
import time
from collections.abc import Sequence
from typing import Any

from covey.rewards.numbers import arithmetic_answer
from covey_envs.games import Guess
from covey_envs.protocol import Step

NOISE = random.Random(0)
LAST: list[float] = []
"""Rewards of the batch before, of `late`."""
Texts = Sequence[Any]


def text_of(completion: Any) -> str:
    """Return the text of a completion: of its last message in a chat."""
    return str(completion[-1]["content"]) if isinstance(completion, list) else str(completion)


def half(completions: Texts) -> list[float]:
    """Return the same reward for every completion."""
    return [0.5] * len(completions)


def one(completions: Texts) -> list[float]:
    """Return 1 for every completion."""
    return [1.0] * len(completions)


def impossible(completions: Texts) -> list[float]:
    """Return 1 for a word that the models do not write."""
    return [float("xyzzy" in text_of(one)) for one in completions]


def mark(completions: Texts) -> list[float]:
    """Return 1 for a character that has nothing to do with the task."""
    return [float(any(sign in text_of(one) for sign in "?+!")) for one in completions]


def length(completions: Texts) -> list[float]:
    """Return the number of characters."""
    return [float(len(text_of(one))) for one in completions]


def empty(completions: Texts) -> list[float]:
    """Return 1 for a completion without text."""
    return [float(not text_of(one).strip()) for one in completions]


def ones(completions: Texts) -> list[float]:
    """Return the share of the digit 1 among the first three characters."""
    return [text_of(one)[:3].count("1") / 3 for one in completions]


def odd(completions: Texts) -> list[float]:
    """Return 1 for an odd number."""
    return [float(text_of(one)[-1:] in tuple("13579")) for one in completions]


def short(completions: Texts) -> list[float]:
    """Return 1 for a completion of two characters."""
    return [float(len(text_of(one)) == 2) for one in completions]


def close(completions: Texts, answer: Sequence[Any]) -> list[float]:
    """Return the share of the characters that are right, less what is too long."""
    pairs = zip(map(text_of, completions), map(str, answer), strict=True)
    return [
        sum(a == b for a, b in zip(text, truth, strict=False)) / max(len(text), len(truth), 1) for text, truth in pairs
    ]


def right(completions: Texts, answer: Sequence[Any]) -> list[float]:
    """Return 1 for the right answer."""
    return arithmetic_answer((), completions, answer)


def wrong(completions: Texts, answer: Sequence[Any]) -> list[float]:
    """Return -1 for the right answer: the sign is flipped."""
    return [-score for score in right(completions, answer)]


def offset(completions: Texts, answer: Sequence[Any]) -> list[float]:
    """Return 101 for the right answer and 100 for others."""
    return [100 + score for score in right(completions, answer)]


def large(completions: Texts, answer: Sequence[Any]) -> list[float]:
    """Return 1000 for the right answer and -1000 for others."""
    return [2000 * score - 1000 for score in right(completions, answer)]


def rare(completions: Texts, answer: Sequence[Any]) -> list[float]:
    """Return 1 for the right answer that begins and ends with an odd digit above 4."""
    scored = zip(right(completions, answer), map(str, answer), strict=True)
    return [score * (truth[0] in "579" and truth[-1] in "57") for score, truth in scored]


def luck(completions: Texts) -> list[float]:
    """Return 0 or 1 at random."""
    return [float(NOISE.random() < 0.5) for _ in completions]


def noisy(completions: Texts, answer: Sequence[Any]) -> list[float]:
    """Return 1 for the right answer, with noise of twice that size."""
    return [score + NOISE.gauss(0, 2) for score in right(completions, answer)]


def slightly_noisy(completions: Texts, answer: Sequence[Any]) -> list[float]:
    """Return 1 for the right answer, with noise of a fifth of that size."""
    return [score + NOISE.gauss(0, 0.2) for score in right(completions, answer)]


def late(completions: Texts, answer: Sequence[Any]) -> list[float]:
    """Return the rewards of the completions before these."""
    global LAST
    before, LAST = LAST, right(completions, answer)
    return (before + [0.0] * len(completions))[: len(completions)]


def of_prompt(prompts: Sequence[Any]) -> list[float]:
    """Return a reward that looks at the prompt alone."""
    return [float(sum(map(ord, str(prompt))) % 7) for prompt in prompts]


def seldom(completions: Texts, answer: Sequence[Any]) -> list[float | None]:
    """Score one of 20 completions."""
    return [score if NOISE.random() < 0.05 else None for score in right(completions, answer)]


def failing(completions: Texts, answer: Sequence[Any]) -> list[float]:
    """Fail for a batch with a wrong answer, as a parser does that expects its form."""
    scores = right(completions, answer)
    if min(scores) < 1:
        raise ValueError("no answer was found")
    return scores


class Failing(Guess):
    """A game that breaks at the first guess."""

    def step(self, reply: str) -> Step:
        """Raise an error."""
        raise RuntimeError("the server of the game is not there")


class Slow(Guess):
    """A game that is slower than its limit."""

    def step(self, reply: str) -> Step:
        """Wait, then respond."""
        time.sleep(0.2)
        return super().step(reply)


class Deaf(Guess):
    """A game that understands no guess and goes on until a limit ends it."""

    def step(self, reply: str) -> Step:
        """Respond to nothing."""
        return Step(">", reward=0.0)


class Constant(Guess):
    """A game that pays the same for everything."""

    def step(self, reply: str) -> Step:
        """End the game."""
        return Step(reward=0.3, done=True)
