"""Functions whose schemas `make_tool_schemas.py` writes and `plugins/covey_envs/tests/test_tools.py` compares."""

from collections.abc import Sequence
from enum import Enum
from typing import Any, Literal, Optional, Union


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


def plain(a: int, b: float = 0.5, c: str = "", d: bool = False) -> int:
    """Add two numbers,
    and more.

    A second paragraph.

    Args:
        a: The first number.
        b: The second one: it has
            a second line.

        c: A text
        d: Whether
           it
           counts.

    Returns:
        The sum: of both.

    Raises:
        ValueError: never.
    """
    return a


def nested(
    a: list[int],
    b: list,  # type: ignore[type-arg]
    c: dict[str, list[float]],
    d: tuple[int, str],
    e: int | None = None,
    f: Optional[list[str]] = None,  # noqa: UP045
    g: Union[int, str, None] = None,  # noqa: UP007
    h: list[int] | str = "",
    i: Any = None,
    j: dict = {},  # type: ignore[type-arg]  # noqa: B006
    k: int | float = 1,
) -> Sequence[str]:
    """Take all kinds of values.

    Args:
        a: One
        b: Two
        c: Three
        d: Four
        e: Five
        f: Six
        g: Seven
        h: Eight
        i: Nine
        j: Ten
        k: Eleven
    """
    return []


def chosen(
    drink: str, size: Literal["small", "large"], number: Literal[1, 2, "many"], colour: Colour
) -> dict[str, Any]:
    """Order a drink.

    Args:
        drink: The drink (choices: ["tea", " coffee "])
        size: How large it is
        number: How many
        colour: The colour of the cup.
    """
    return {}


def nothing() -> None:
    """Do nothing."""


async def later(name: str) -> str:
    """Wait for it. Args: are described below.

    Args:
        name: Its name
    Returns:
        The answer
    """
    return name


CHAT = [
    {"role": "system", "content": "Be exact."},
    {"role": "user", "content": "Is 2 + 3 < 6, \u00fcber alles?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00001", "type": "function", "function": {"name": "plain", "arguments": {"a": 2}}}],
    },
    {"role": "tool", "name": "plain", "tool_call_id": "call00001", "content": "5"},
]
FUNCTIONS = (plain, nested, chosen, nothing, later)
