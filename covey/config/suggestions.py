"""Suggestions for unknown keywords of the Python API: the nearest name, the class that has it, or our name for that of
another library.
"""

import difflib
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass
from typing import Any, get_type_hints

import covey
from covey.config import foreign_names
from covey.errors import nearest

CLASSES: list[type] = []
"""Public classes whose keywords are suggested, as far as they are imported."""


def register(cls: type) -> None:
    """Suggest keywords of `cls` from now on, if it is public."""
    if cls.__name__ in covey.__all__:
        CLASSES.append(cls)


def keywords_of(cls: type) -> dict[str, Any] | None:
    """Return the keywords of the constructor of `cls` and their types, in order, with those passed to a base class.

    The result is None if it takes any keyword: a user's own class with `**others`.
    """
    if is_dataclass(cls):
        return {name: kind for name, kind in get_type_hints(cls).items() if name in cls.__dataclass_fields__}
    kinds: dict[str, Any] = {}
    for one in (one for one in cls.__mro__ if "__init__" in vars(one)):
        parameters = list(inspect.signature(vars(one)["__init__"]).parameters.values())[1:]
        kinds |= {p.name: p.annotation for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        if all(p.kind is not p.VAR_KEYWORD for p in parameters):
            break
        if one.__module__.partition(".")[0] != covey.__name__:
            return None
    return kinds


def suggest(cls: type, name: str, more: Iterable[str] = ()) -> str:
    """Return advice about the unknown keyword `name` of `cls`, or of its function with the keywords `more`."""
    known = [*(keywords_of(cls) or ()), *more]
    if advice := foreign_names.argument(name) or foreign_names.answer(name, lambda path: _spelt(path, cls)):
        return advice
    if owners := list(_owners(name)):
        return "it belongs elsewhere: " + " or ".join(f"{owner.__name__}({name}=...)" for owner in owners)
    everywhere = {key for one in _concrete() for key in keywords_of(one) or ()}
    for close in difflib.get_close_matches(name, sorted(everywhere.union(known)), n=1):
        if close not in known:
            return f"did you mean {next(_owners(close)).__name__}({close}=...)?"
    return nearest(name, known)


def _owners(name: str) -> Iterator[type]:
    """Return the classes that take the keyword `name`, except subclasses of another of them."""
    having = [cls for cls in _concrete() if name in (keywords_of(cls) or ())]
    return (cls for cls in having if not any(cls is not other and issubclass(cls, other) for other in having))


def _concrete() -> list[type]:
    """Return the classes of which objects can be made."""
    return [cls for cls in CLASSES if not inspect.isabstract(cls)]


def _spelt(path: str, asked: type) -> str | None:
    """Return a recipe's setting `path` as a keyword, of the class `asked` if the section is its own."""
    section, _, name = path.rpartition(".")
    of_section = [cls for cls in CLASSES if getattr(cls, "section", None) == section]
    owners = [asked] if asked in of_section else of_section
    return next((f"{cls.__name__}({name}=...)" for cls in owners if name in (keywords_of(cls) or ())), None)
