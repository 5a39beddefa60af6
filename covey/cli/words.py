"""Take the words of a command line apart: switches, positional words and settings."""

from collections.abc import Collection, Iterable, Sequence

from covey.config import recipe
from covey.config.overrides import split
from covey.errors import CoveyError

Pairs = list[tuple[str, str]]
"""Settings as (flag, value), as `overrides.split` returns them."""


def take_switches(words: Sequence[str], switches: Collection[str]) -> tuple[set[str], list[str]]:
    """Return those of `switches` that are among `words`, and the other words."""
    return set(switches) & set(words), [word for word in words if word not in switches]


def take_options(pairs: Pairs, names: Collection[str]) -> tuple[dict[str, str], Pairs]:
    """Return the values of the command's own options `names`, and the other pairs: settings of a recipe."""
    return {name: value for name, value in pairs if name in names}, [pair for pair in pairs if pair[0] not in names]


def split_exactly(count: int, words: Sequence[str], usage: str) -> tuple[list[str], Pairs]:
    """Split `words` as `overrides.split` does, into exactly `count` positional words and pairs.

    Raises:
        CoveyError: there are more or fewer positional words; the error shows `usage`.
    """
    found, pairs = split(words, count)
    if len(found) < count:
        raise CoveyError("an argument is missing", want=usage)
    return found, pairs


def parse_count(options: dict[str, str], name: str) -> int | None:
    """Return the value of the option `name` as a whole number; None if it is not given.

    Raises:
        CoveyError: the value is no whole number from 1 up.
    """
    value = options.get(name)
    if value is not None and not (value.isascii() and value.isdigit() and int(value)):
        raise CoveyError(f"{name} is {value!r}", want="a whole number from 1 up")
    return None if value is None else int(value)


def join_pairs(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Return settings as words of a command line, `--name=value` each."""
    return [f"{flag}={value}" for flag, value in pairs]


def list_recipes(kind: type[recipe.AnyRecipe] = recipe.AnyRecipe) -> str:
    """Return the names of the built-in recipes of one kind, as the fix of an error."""
    return "built-in recipes: " + ", ".join(recipe.names(kind))
