"""Advice about the names of other libraries, and about former names of Covey's own; `foreign_names.toml` holds them.

Errors about an unknown setting or keyword use it. Recipes, the command line and Python spell our names differently
(`Spell`). The file is read at the first unknown name.
"""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

Spell = Callable[[str], str | None]
"""Function from a setting's dotted name in a recipe to its spelling elsewhere; None if it does not exist there."""

OURS = re.compile(r"\{([^{}]+)\}")
"""Pattern of our names in an answer."""

NO_USE = "leave it out"
"""Start of the answer for a name that Covey does not need."""


@functools.cache
def tables() -> dict[str, Any]:
    """Read the data file: {"settings": {library: {answer: names}}, "arguments": {answer: names}}."""
    import tomllib  # late: only an unknown name needs it

    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


@functools.cache
def settings() -> dict[str, str]:
    """Return the answers by the name of a setting in any library."""
    return {name: text for rows in tables()["settings"].values() for name, text in _by_name(rows).items()}


def _by_name(rows: dict[str, list[str]]) -> dict[str, str]:
    return {name: text for text, names in rows.items() for name in names}


def argument(name: str) -> str:
    """Return advice for the keyword `name` of another library's trainer, cluster or config; "" if it is not known."""
    return _advice(_by_name(tables()["arguments"]).get(name, ""))


def answer(name: str, spell: Spell) -> str:
    """Return advice for the setting `name` of another library, which may be a dotted path.

    It is "" if the name is not known, or if none of its equivalents exists in that place.
    """
    known, last = settings(), name.rpartition(".")[2]
    ends = [name.split(".", count)[-1] for count in range(name.count(".") + 1)]
    starts = [start for start in known if start.endswith("*") and last.startswith(start[:-1])]
    text = next((known[end] for end in [*ends, *starts] if end in known), "")
    spelt = {group: next(filter(None, map(spell, group.split("|"))), "") for group in OURS.findall(text)}
    if spelt and not any(spelt.values()):
        return ""
    return _advice(OURS.sub(lambda match: spelt[match[1]] or match[1].split("|")[0], text))


def _advice(text: str) -> str:
    """Convert an answer to a sentence."""
    return text if not text or text.startswith(NO_USE) else f"write {text}"
