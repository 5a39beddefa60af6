"""Keywords of the Python API, answered as the command answers its words.

A class that derives from `Keywords` refuses a keyword that it does not have and names the right one: the nearest, the
class that has it, or what a name of TRL or Tunix is called here (`foreign`). A dataclass that derives from `Config`
also refuses values of a wrong type or out of the range that a recipe has for them (`ranges`). Both before anything is
made, all mistakes at once.
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
"""The public classes that answer, as far as they are imported."""


class Keywords:
    """A class whose constructor answers unknown keywords."""

    def __new__(cls, *args: Any, **keywords: Any) -> Self:
        """Refuses what the constructor cannot take.

        Raises:
            RecipeError: every mistake at once.
        """
        if not strict_yaml.building.get():  # a file's mistakes are told with their lines
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
        """What is wrong with `value` for the keyword `name`, of type `kind`: here only settings of the wrong sort."""
        if any(map(_is_settings, (kind, *get_args(kind)))) and not fits(kind, value):
            yield _misfit(cls, name, kind, value)


class Config(Keywords):
    """A dataclass of settings.

    Attributes:
        section: where its settings stand in a recipe.
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
    """The keywords that the constructor of `cls` takes and their types, in order, with those that it hands on to the
    class it derives from. None when it takes any: a class of a user's own, with `**others`.
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
    """What to write instead of the keyword `name` of `cls`."""
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
    """The classes that take the keyword `name`, without those that derive from another of them."""
    having = [cls for cls in CLASSES if name in (taken(cls) or ())]
    return (cls for cls in having if not any(cls is not other and issubclass(cls, other) for other in having))


def _spelt(path: str, asked: type[Keywords]) -> str | None:
    """The setting at `path` of a recipe as a keyword: of the class that was asked, where the section is its own."""
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
    """Whether a field of type `kind` may hold `value`. Scalars of NumPy are numbers, lists will do for tuples, paths
    for text. A field for settings takes an object in their place, such as an optax transformation.
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
    """An array without axes as the number that it holds."""
    try:
        return value.item() if getattr(value, "ndim", None) == 0 else value
    except Exception:  # an array of something else, such as a key of JAX
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
    """The nearest choice, where the field has some."""
    choices = [choice for one in (kind, *get_args(kind)) if get_origin(one) is Literal for choice in get_args(one)]
    return nearest(value, choices) if choices and isinstance(value, str) else ""
