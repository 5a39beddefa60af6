"""The long-sums task: sums of two four-digit numbers, which small models get wrong, to be computed by a tool.

Each prompt shows two problems with a call of the calculator in SmolLM2's form, its result and the answer. After one
SmolLM2-135M makes no call in 32 tries, after three nearly always. A tenth of the problems is held out: no pair of the
test is trained on in either order.
"""

import json
import random
from typing import Any

SYSTEM = "Compute sums with the calculator. Then answer with the number only."

NUMBERS = range(1000, 10_000)
"""Numbers that are added."""

SHOWN = ((2417, 3862), (5093, 1448))
"""Problems that every prompt shows; they are in neither set."""

NUM_ROWS, NUM_TEST_ROWS = 4000, 400
"""Number of problems drawn, and of those that only the test set has."""


def make_rows(seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return training and test rows (`prompt`, `answer`); the seed draws the problems and picks those held out."""
    rng, pairs = random.Random(seed), set[tuple[int, int]]()
    while len(pairs) < NUM_ROWS:
        a, b = rng.choice(NUMBERS), rng.choice(NUMBERS)
        if not {(a, b), (b, a)} & {*SHOWN} and (b, a) not in pairs:
            pairs.add((a, b))
    rows = [{"prompt": _prompt(a, b), "answer": str(a + b)} for a, b in sorted(pairs)]
    rng.shuffle(rows)
    return rows[NUM_TEST_ROWS:], rows[:NUM_TEST_ROWS]


def _prompt(a: int, b: int) -> list[dict[str, str]]:
    return [*(message for pair in SHOWN for message in _solved(*pair)), {"role": "user", "content": _question(a, b)}]


def _solved(a: int, b: int) -> list[dict[str, str]]:
    call = [{"name": "calculator", "arguments": {"expression": f"{a} + {b}"}}]
    return [
        {"role": "user", "content": _question(a, b)},
        {"role": "assistant", "content": f"<tool_call>{json.dumps(call)}</tool_call>"},
        {"role": "user", "content": f"<tool_response>\n{a + b}\n</tool_response>"},
        {"role": "assistant", "content": str(a + b)},
    ]


def _question(a: int, b: int) -> str:
    return f"What is {a} + {b}?"
