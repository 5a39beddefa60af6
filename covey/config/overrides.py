"""Settings from the command line, which override those of a recipe.

`--grpo.beta 0.1`, `--grpo.beta=0.1` and `grpo.beta=0.1` mean the same, and so do `-` and `_`. The end of a dotted
name is enough if only one setting ends so: `--max-steps 3`, `--lora.rank 8`. Of a setting that is given twice the last
value counts, and the parts of a list are joined: `--rewards a --rewards b` is `--rewards a,b`.
"""

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from covey.config import foreign_names
from covey.config.base import Config, leaves
from covey.config.strict_yaml import Document, from_text
from covey.errors import RecipeError


def apply(
    cls: type[Config], document: Document, tokens: Sequence[str], hidden: Mapping[str, str] = MappingProxyType({})
) -> Document:
    """Override the settings of `document` by those in `tokens`, and return it.

    Args:
        cls: class of the settings that may be named; its sections count.
        tokens: words of the command line; every one must belong to a setting.
        hidden: dotted names of `cls` that may not be set, each with the reason.

    Raises:
        RecipeError: a name is unknown or ambiguous, or has no value.
    """
    kinds = {path: kind for path, kind in leaves(cls).items() if path not in hidden}
    values: dict[str, Any] = {}
    for flag, text in split(tokens, 0)[1]:
        if _name(flag) in hidden:
            raise RecipeError(f"{flag} {hidden[_name(flag)]}")
        path = resolve(flag, kinds)
        value, earlier = from_text(kinds[path], text), values.get(path)
        values[path] = [*earlier, *value] if isinstance(earlier, list) and isinstance(value, list) else value
        document.override(path, values[path], flag)
    return document


def split(tokens: Sequence[str], positionals: int) -> tuple[list[str], list[tuple[str, str]]]:
    """Split a command line into positional words, at most `positionals`, and (flag, value) pairs as written.

    After a bare `--` every word is positional. A word with `=` is a setting once all positional words are read.
    """
    words: list[str] = []
    pairs: list[tuple[str, str]] = []
    rest = list(tokens)
    while rest:
        token = rest.pop(0)
        if token == "--":
            words, rest = words + rest, []
        elif token.startswith("--"):
            flag, equals, value = token.partition("=")
            pairs.append((flag, value if equals else _value(flag, rest)))
        elif len(words) >= positionals and re.match(r"[A-Za-z_][\w.-]*=", token):
            flag, _, value = token.partition("=")
            pairs.append((flag, value))
        else:
            words.append(token)
    if len(words) > positionals:
        raise RecipeError(f"{words[positionals]!r} is one word too many", want="settings as --name value or name=value")
    return words, pairs


def resolve(flag: str, paths: Collection[str]) -> str:
    """Return the dotted name among `paths` that `flag` means.

    Raises:
        RecipeError: `flag` matches no name, or more than one.
    """
    matches = meanings(_name(flag), paths)
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise RecipeError(f"{flag} could be any of: {', '.join(map(_flag, matches))}", fix="write it in full")
    raise RecipeError(f"there is no setting {flag}", fix=_suggest(_name(flag), paths))


def meanings(name: str, paths: Collection[str]) -> list[str]:
    """Return the dotted names among `paths` that `name` may mean: itself, or those that end so."""
    ending = [path for path in paths if path.endswith(f".{name}")]
    return [name] if name in paths else [p for p in ending if SECOND.isdisjoint(p.removesuffix(name).split("."))]


def _suggest(name: str, paths: Collection[str]) -> str:
    """Suggest the equivalent of another library's name, or else the nearest name.

    The nearest name is searched in the section that `name` includes, or else among all names and their ends.
    """
    section, _, last = name.rpartition(".")
    if last in paths:
        return f"did you mean {_flag(last)}?"
    if known := foreign_names.answer(name, {path: _flag(path) for path in paths}.get):
        return known
    inside = (
        {path.removeprefix(section + "."): path for path in paths if path.startswith(section + ".")} if section else {}
    )
    ends = {path.split(".", n)[-1]: path for path in paths for n in range(path.count(".") + 1)}
    close = difflib.get_close_matches(last if inside else name, inside or ends, n=1)
    if close:
        return f"did you mean {_flag((inside or ends)[close[0]])}?"
    return "one of: " + ", ".join(map(_flag, inside.values())) if inside else "--help lists all settings"


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _flag(path: str) -> str:
    return "--" + path.replace("_", "-")


def _value(flag: str, rest: list[str]) -> str:
    if not rest or rest[0].startswith("--"):
        raise RecipeError(f"{flag} has no value", want=f"{flag} VALUE")
    return rest.pop(0)


SECOND = {"critic_optimizer", "role_to_mesh"}
"""Sections that repeat the settings of a more common section; a name without its section means the common one."""
