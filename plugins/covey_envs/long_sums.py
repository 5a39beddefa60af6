"""The task long-sums: sums of four digits, which small models get wrong, by a call of the calculator.

A prompt shows two problems, each with a call in SmolLM2's form, its result and the answer. After one SmolLM2-135M makes
no call in 32 tries, after three nearly always. A tenth of the problems is held out, a + b and b + a together. The
problems that a prompt shows are in neither set.
"""

import json
import random
from typing import Any

from covey.data.arithmetic import question
from covey.data.rows import Row, chat
from covey.data.sources import with_answers

SYSTEM = "Compute sums with the calculator. Then answer with the number only."

NUMBERS = range(1000, 10_000)
"""Numbers that are added in long sums."""

SHOWN = ((2417, 3862), (5093, 1448))
"""Problems that every prompt shows."""

NUM_ROWS, NUM_TEST_ROWS = 4000, 400
"""Number of long sums drawn, and of those that only the test set has."""


def make_rows(seed: int) -> tuple[list[Row], list[Row]]:
    """Make training and test rows (`prompt`, `answer`); the seed draws the problems and those held out."""
    rng, pairs = random.Random(seed), set[tuple[int, int]]()
    while len(pairs) < NUM_ROWS:
        a, b = rng.choice(NUMBERS), rng.choice(NUMBERS)
        if not {(a, b), (b, a)} & {*SHOWN} and (b, a) not in pairs:
            pairs.add((a, b))
    shown = [text for pair in SHOWN for text in _calculation(*pair)]
    rows = [{"prompt": chat(*shown, question("+", *pair)), "answer": str(sum(pair))} for pair in sorted(pairs)]
    rng.shuffle(rows)
    return rows[NUM_TEST_ROWS:], rows[:NUM_TEST_ROWS]


def _calculation(a: int, b: int) -> tuple[str, str, str, str]:
    """Return the messages of a solved long sum: question, call, result and answer."""
    call: list[dict[str, Any]] = [{"name": "calculator", "arguments": {"expression": f"{a} + {b}"}}]
    result = f"<tool_response>\n{a + b}\n</tool_response>"
    return question("+", a, b), f"<tool_call>{json.dumps(call)}</tool_call>", result, str(a + b)


LONG_SUMS = with_answers(make_rows, SYSTEM)
