"""Text that others see: on the terminal, in logs, in what goes out to trackers and reports.

Models, data and file names are not ours. What is not printable is shown as its escape, so that no text can move the
cursor, colour the screen or turn the direction of writing; and no secret of the environment is in it.
"""

import html
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from covey.errors import RecipeError

SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD|PASSWD", re.I)
"""Names of environment variables whose values nobody else should see."""
ADDRESS = re.compile(r"://|www\.|@", re.I)
"""In words that Markdown makes links of, though nothing marks them (GitHub's extension; `user@host` is one, too)."""
SHORTEST = 8
"""Characters of a value that can be a secret: `1` is none, and would be masked in every number."""


def printable(text: str, keep: str = "") -> str:
    """`text` with control, direction and other invisible characters as escapes, but for those in `keep`; secrets are
    masked.

    >>> printable("red \\x1b[31m")
    'red \\\\x1b[31m'
    """
    text = masked(text)
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode("ascii") for c in text)


def in_markdown(text: str) -> str:
    """`text` as one line of Markdown that means nothing but itself: no tag, no table cell, no heading, no link. An
    address, which Markdown would make a link of, stands as code.

    >>> in_markdown("a|b `c`\\n<img src=x> at https://x.example")
    'a\\\\|b \\\\`c\\\\`\\\\\\\\n&lt;img src=x&gt; at `https://x.example`'
    """
    parts = re.split(r"([^\s<>`*|\\\[\]]+)", printable(text).strip())
    shown = "".join(f"`{part}`" if ADDRESS.search(part) else _without_marks(part) for part in parts)
    return re.sub(r"^([#+=~-]|\d+(?=[.)]))", lambda found: _as_text(found[0]), shown)


def _without_marks(text: str) -> str:
    return re.sub(r"([\\`*|\[\]])", r"\\\1", html.escape(text, quote=False))


def _as_text(mark: str) -> str:
    """The first mark of a line, so that it begins no heading, list, rule or block."""
    return f"{mark}\\" if mark.isdigit() else f"\\{mark}"


def masked(value: Any) -> Any:
    """`value` with every secret of the environment out of its texts, and lists in place of tuples."""
    if isinstance(value, Mapping):
        return {name: masked(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [masked(entry) for entry in value]
    if isinstance(value, str):
        for _, secret in _secrets():
            value = value.replace(secret, "***")
    return value


def refuse_secrets(recipe: str) -> None:
    """Refuse a recipe that holds a secret: it is written into the run folder, and told to trackers.

    Raises:
        RecipeError: which names the variable, not its value.
    """
    for name, secret in _secrets():
        if secret in recipe:
            raise RecipeError(
                f"the recipe holds the value of the environment variable {name}",
                want="secrets in the environment alone: a recipe is written down with its run",
                fix="take it out; the packages that need it find it in the environment",
            )


def _secrets() -> Iterator[tuple[str, str]]:
    """Name and value of each. A path is none: its variable says where a secret lies."""
    for name, value in os.environ.items():
        if SECRET.search(name) and len(value) >= SHORTEST and not os.path.exists(value):
            yield name, value
