"""Prompts and completions as a page keeps them: long ones without their middle, and each prompt once."""

from collections.abc import Callable
from typing import Any

from covey.report.run_data import Row
from covey.report.script_json import script_json, size_of

HEAD, TAIL = 4000, 2000
"""Number of characters kept from the beginning and the end of a long text."""

Mask = Callable[[Any], Any]
"""Function that masks the secrets in the strings of a value."""


class Prompts:
    """Table of prompts: they repeat from sample to sample and from step to step.

    Attributes:
        encoded: the prompts as JSON, each a list of turns `[role, text]`.
    """

    def __init__(self) -> None:
        self.encoded: list[str] = []
        self._numbers: dict[tuple[str, str], int] = {}

    def add(self, row: Row) -> tuple[int, int]:
        """Add the prompt of `row`; return its number, and the bytes that this took."""
        key = str(row.get("prompt")), str(row.get("turns"))
        if key in self._numbers:
            return self._numbers[key], 0
        self._numbers[key] = len(self.encoded)
        self.encoded.append(script_json(prompt_turns(row)))
        return self._numbers[key], size_of(self.encoded[-1])


def shortened(text: Any) -> Any:
    """Return a text as the page keeps it: itself, or `[head, number of characters left out, tail]`."""
    text = text if isinstance(text, str) else ""
    if len(text) <= HEAD + TAIL + 200:
        return text
    return [text[:HEAD], len(text) - HEAD - TAIL, text[-TAIL:]]


def prompt_turns(row: Row) -> list[list[Any]]:
    """Return the prompt of `row` as turns `[role, text]`; one turn without a role if its turns are not recorded.

    `turns` of the row has the role and the number of characters of each message of `prompt`.

    >>> prompt_turns({"prompt": "user: Hi\\nassistant: Ho", "turns": [["user", 2], ["assistant", 2]]})
    [['user', 'Hi'], ['assistant', 'Ho']]
    """
    text = row.get("prompt")
    text = text if isinstance(text, str) else ""
    found, place = [], 0
    turns = row.get("turns")
    for turn in turns if isinstance(turns, list) else ():
        role, length = turn if isinstance(turn, list) and len(turn) == 2 else ("", -1)
        begin = f"{role}: "
        if not isinstance(length, int) or length < 0 or not text.startswith(begin, place):
            return [["", shortened(text)]]
        place += len(begin)
        found.append([role, shortened(text[place : place + length])])
        place += length + 1
    return found if found and place == len(text) + 1 else [["", shortened(text)]]
