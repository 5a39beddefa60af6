"""Prompts and completions as a page keeps them: long ones without their middle, and each prompt once.

They are JSON in a script element, where no text can end the element or begin another. A page may have a hundred
thousand texts: `script_json` and `number_json` encode one value each, which the callers join, because to build such a
tree and encode it as a whole takes three times as long.
"""

import json
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from covey.files import number
from covey_report.run_data import Row

MODEL = "assistant"
"""Role of the turns of the model."""
MAX_TURNS = 200
"""Maximum number of turns of a conversation that are shown apart."""
HEAD, TAIL = 4000, 2000
"""Number of characters kept from the beginning and the end of a long text."""

Key = TypeVar("Key")
Mask = Callable[[Any], Any]
"""Function that masks the secrets in the strings of a value."""
ESCAPED = re.compile(
    "[<>&\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\U000e0000-\U000e007f]"
)
"""Pattern of characters that are escaped: markup, and invisible characters."""


ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


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
    return split_turns(text, row.get("turns")) or [["", shortened(text)]]


def completion_form(row: Row) -> Any:
    """Return the completion of `row` as the page keeps it: its text, or the turns of its episode as `{"turns": ...}`.

    A turn is `[role, text]`, one of the model `[role, text, reward, tokens generated, tokens inserted before it]`. The
    row has role and number of characters of each message in `messages`, the others in `turn_rewards`, `turn_tokens`
    and `turn_ends`.

    >>> row = {"text": "assistant: 5\\nenvironment: less\\nassistant: 4", "turn_rewards": [0, 1], "turn_ends": [2, 5]}
    >>> row |= {"messages": [["assistant", 1], ["environment", 4], ["assistant", 1]], "turn_tokens": [2, 2]}
    >>> completion_form(row)
    {'turns': [['assistant', '5', 0.0, 2, 0], ['environment', 'less'], ['assistant', '4', 1.0, 2, 1]]}
    """
    text = row.get("text")
    turns = split_turns(text, row.get("messages")) if isinstance(text, str) else None
    if not turns:
        return shortened(text)
    of_model = [turn for turn in turns if turn[0] == MODEL]
    names = ("turn_rewards", "turn_ends", "turn_tokens")
    rewards, ends, tokens = (_numbers(row.get(name), len(of_model)) for name in names)
    for turn, reward, begin, end, generated in zip(of_model, rewards, [0.0, *ends], ends, tokens, strict=False):
        inserted = None if generated is None or end is None or begin is None else int(end - begin - generated)
        turn += [reward, None if generated is None else int(generated), inserted]
    return {"turns": turns}


def split_turns(text: str, turns: Any) -> list[list[Any]] | None:
    """Take `text`, messages with their roles, apart into turns `[role, text]`.

    Args:
        turns: role and number of characters of each message.

    Returns:
        None if the text does not consist of these messages, or of too many.
    """
    parts: list[list[Any]] = []
    position = 0
    for turn in turns if isinstance(turns, list) and len(turns) <= MAX_TURNS else ():
        role, length = turn if isinstance(turn, list) and len(turn) == 2 else ("", -1)
        begin = f"{role}: "
        if not isinstance(length, int) or length < 0 or not text.startswith(begin, position):
            return None
        position += len(begin)
        parts.append([role, shortened(text[position : position + length])])
        position += length + 1
    return parts if parts and position == len(text) + 1 else None


def _numbers(values: Any, count: int) -> list[float | None]:
    """Return `count` numbers; None where one is missing."""
    numbers = [number(value) for value in values[:count]] if isinstance(values, list) else []
    return numbers + [None] * (count - len(numbers))


def script_json(value: Any) -> str:
    r"""Encode `value`: its text can neither end the element nor begin another.

    >>> script_json("</script>\u2028")
    '"\\u003c/script\\u003e\\u2028"'
    """
    text = ENCODER.encode(value)
    return ESCAPED.sub(_as_escape, text) if ESCAPED.search(text) else text


def number_json(value: Any, digits: int = 4) -> str:
    """Encode a number with `digits` significant digits; anything but a finite number is null.

    >>> number_json(0.123456), number_json("x"), number_json(1e-7)
    ('0.1235', 'null', '1e-07')
    """
    figure = number(value)
    return "null" if figure is None else f"{figure:.{digits}g}"


def fitting(parts: Iterable[tuple[Key, str, int]], budget: int) -> dict[Key, str]:
    """Return the texts by key of the first `parts`, at least one, whose sizes sum up to at most `budget` bytes.

    >>> fitting([("a", "x", 9), ("b", "", 1), ("c", "y", 9)], 10)
    {'a': 'x'}
    """
    texts: dict[Key, str] = {}
    for key, text, size in parts:
        budget -= size
        if budget < 0 and texts:
            break
        texts |= {key: text} if text else {}
    return texts


def size_of(encoded: str) -> int:
    """Return the number of bytes of an encoded value in UTF-8."""
    return len(encoded) if encoded.isascii() else len(encoded.encode("utf-8"))


def _as_escape(match: re.Match[str]) -> str:
    character = match[0]
    return f"\\u{ord(character):04x}" if ord(character) < 128 else json.dumps(character)[1:-1]
