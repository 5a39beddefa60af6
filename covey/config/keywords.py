"""Checks of the Python API's keywords, with the same errors as on the command line.

A class that derives from `Keywords` refuses an unknown keyword and names the right one: the nearest, the class that has
it, or the equivalent of a name from TRL or Tunix (`foreign_names`). A dataclass that derives from `Config` also refuses
values of a wrong type or out of the range that recipes have for them (`ranges`). One error reports all mistakes, before
the object is made.
"""

import difflib
import inspect
import numbers
import os
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Self, Union, get_args, get_origin

import covey
from covey.config import foreign_names, strict_yaml
from covey.config.ranges import misplaced
from covey.errors import RecipeError, nearest

CLASSES: list[type["Keywords"]] = []
"""Public classes derived from `Keywords`, as far as they are imported."""


class Keywords:
    """Base class whose constructor refuses unknown keywords and suggests the right ones."""

    def __new__(cls, *args: Any, **keywords: Any) -> Self:
        """Refuse arguments that the constructor does not accept.

        Raises:
            RecipeError: arguments are invalid; the error lists all of them.
        """
        if not strict_yaml.building.get():  # mistakes in a file are reported with their lines
            strict_yaml.raise_together(list(cls._mistakes(args, keywords)))
        return super().__new__(cls)

    def __init_subclass__(cls, **others: Any) -> None:
        super().__init_subclass__(**others)
        if cls.__name__ in covey.__all__:
            CLASSES.append(cls)

    @classmethod
    def _mistakes(cls, args: Sequence[Any], keywords: Mapping[str, Any]) -> Iterator[RecipeError]:
        if (known := taken(cls)) is None:
            return
        for name in keywords:
            if name not in known:
                yield RecipeError(f"{cls.__name__} has no keyword {name!r}", fix=_answer(cls, name, list(known)))
        for name, value in [*zip(known, args, strict=False), *keywords.items()]:
            if name in known:
                yield from cls._misfits(name, known[name], value)

    @classmethod
    def _misfits(cls, name: str, kind: Any, value: Any) -> Iterator[RecipeError]:
        """Yield errors of `value` for the keyword `name` of type `kind`: here only a wrong settings class."""
        if any(map(_is_settings, (kind, *get_args(kind)))) and not fits(kind, value):
            yield _misfit(cls, name, kind, value)


class Config(Keywords):
    """Base class for dataclasses of settings.

    Attributes:
        section: dotted name of the recipe section with these settings.
    """

    section = ""

    def __init_subclass__(cls, section: str | None = None, **others: Any) -> None:
        super().__init_subclass__(**others)
        cls.section = cls.section if section is None else section

    @classmethod
    def _misfits(cls, name: str, kind: Any, value: Any) -> Iterator[RecipeError]:
        path = f"{cls.section}.{name}".lstrip(".")
        if not fits(kind, value):
            yield _misfit(cls, path, kind, value)
        else:
            for _, what, want in misplaced(path, value):
                yield RecipeError(what, want=want, where=cls.__name__)


def taken(cls: type) -> dict[str, Any] | None:
    """Return the keywords of the constructor of `cls` and their types, in order, with those passed to a base class.

    The result is None if it takes any keyword: a user's own class with `**others`.
    """
    kinds: dict[str, Any] = {}
    for one in (one for one in cls.__mro__ if "__init__" in vars(one)):
        parameters = list(inspect.signature(vars(one)["__init__"]).parameters.values())[1:]
        kinds |= {p.name: p.annotation for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        if all(p.kind is not p.VAR_KEYWORD for p in parameters):
            break
        if one.__module__.partition(".")[0] != covey.__name__:
            return None
    return kinds


def _answer(cls: type[Keywords], name: str, known: Sequence[str]) -> str:
    """Return advice about the unknown keyword `name` of `cls`."""
    if found := foreign_names.advice(foreign_names.ARGUMENTS.get(name, "")) or foreign_names.answer(
        name, lambda path: _spelt(path, cls)
    ):
        return found
    if owners := list(_owners(name)):
        return "it belongs elsewhere: " + " or ".join(f"{owner.__name__}({name}=...)" for owner in owners)
    everywhere = {key for one in CLASSES for key in taken(one) or ()}
    for close in difflib.get_close_matches(name, sorted(everywhere.union(known)), n=1):
        if close not in known:
            return f"did you mean {next(_owners(close)).__name__}({close}=...)?"
    return nearest(name, known)


def _owners(name: str) -> Iterator[type[Keywords]]:
    """Return the classes that take the keyword `name`, except subclasses of another of them."""
    having = [cls for cls in CLASSES if name in (taken(cls) or ())]
    return (cls for cls in having if not any(cls is not other and issubclass(cls, other) for other in having))


def _spelt(path: str, asked: type[Keywords]) -> str | None:
    """Return a recipe's setting `path` as a keyword, of the class `asked` if the section is its own."""
    section, _, name = path.rpartition(".")
    of_section = [cls for cls in CLASSES if issubclass(cls, Config) and cls.section == section]
    owners = [asked] if asked in of_section else of_section
    return next((f"{cls.__name__}({name}=...)" for cls in owners if name in (taken(cls) or ())), None)


def _misfit(cls: type, name: str, kind: Any, value: Any) -> RecipeError:
    want = " or ".join(f"{one.__name__}(...)" for one in (kind, *get_args(kind)) if _is_settings(one))
    fix = _nearest_choice(kind, value)
    return RecipeError(
        f"{name} is {_shown(value)}", want=want or strict_yaml.describe(kind), fix=fix, where=cls.__name__
    )


def fits(kind: Any, value: Any) -> bool:
    """Return whether `value` is valid for a field of type `kind`.

    NumPy scalars are valid as numbers, lists as tuples and paths as text. A field for settings also takes objects
    such as an optax transformation.
    """
    value = _scalar(value)
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return any(fits(one, value) for one in inner)
    if origin is Literal:
        return isinstance(value, str) and value in inner
    if origin is tuple:
        return isinstance(value, (list, tuple)) and all(fits(inner[0], one) for one in value)
    if origin is dict:
        return isinstance(value, Mapping) and all(fits(str, k) and fits(inner[1], v) for k, v in value.items())
    if _is_settings(kind):
        return isinstance(value, kind) or not (isinstance(value, (*_PLAIN, Config)) or type(value) is tuple)
    return _SCALARS.get(kind, lambda value: True)(value)


def _scalar(value: Any) -> Any:
    """Convert an array without axes to the number that it holds."""
    try:
        return value.item() if getattr(value, "ndim", None) == 0 else value
    except Exception:  # an array that holds no number, such as a JAX key
        return value


def _is_settings(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Config)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


_PLAIN = (str, bytes, numbers.Number, list, Mapping, types.NoneType)
_SCALARS = {
    types.NoneType: lambda value: value is None,
    bool: lambda value: isinstance(value, bool),
    int: lambda value: _is_number(value) and isinstance(value, numbers.Integral),
    float: lambda value: _is_number(value) and strict_yaml.is_finite(value),
    str: lambda value: isinstance(value, (str, os.PathLike)),
}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _nearest_choice(kind: Any, value: Any) -> str:
    """Return the choice nearest to `value`; "" if the field has no choices."""
    choices = [choice for one in (kind, *get_args(kind)) if get_origin(one) is Literal for choice in get_args(one)]
    return nearest(value, choices) if choices and isinstance(value, str) else ""
