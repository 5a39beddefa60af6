"""Base class of all settings: frozen dataclasses whose values pydantic checks, with the errors of this package.

A class that derives from `Config` is a dataclass. Its fields have strict types, ranges and choices; unknown keywords
are refused; `contradictions` compares its fields with each other. One `RecipeError` reports all wrong keywords and
values of a call; if there are none, all contradictions. NumPy scalars are valid as numbers, lists as tuples, and paths
as text. `Keywords` refuses unknown keywords of learners and clusters with the same errors. This module does not import
JAX.
"""

import inspect
import os
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import Field, dataclass, field, fields
from functools import cache, partial, wraps
from itertools import islice
from threading import RLock
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Self,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from annotated_types import Ge, Gt, Le, Lt
from pydantic import ConfigDict, GetCoreSchemaHandler, TypeAdapter, ValidationError
from pydantic_core import CoreSchema, ErrorDetails, core_schema
from typing_extensions import TypedDict

import covey
from covey.config import foreign_names
from covey.config.kinds import choices, describe
from covey.errors import MAX_LISTED, RecipeError, nearest, raise_together

MAX_INT = 2**31 - 1
"""Largest whole number of any setting: counts beyond it cannot be meant, and lists of such a length fill the memory."""
MAX_SHOWN = 200
"""Largest number of characters of a wrong value that an error shows."""

Int = Annotated[int, Le(MAX_INT)]
NonNegativeInt = Annotated[int, Ge(0), Le(MAX_INT)]
PositiveInt = Annotated[int, Ge(1), Le(MAX_INT)]
GroupSize = Annotated[int, Ge(1), Le(2**16)]
"""Number of completions of one prompt: larger groups than any that was published, and lists that fit the memory."""
NonNegativeFloat = Annotated[float, Ge(0)]
PositiveFloat = Annotated[float, Gt(0)]
Fraction = Annotated[float, Gt(0), Le(1)]
"""A part of something, which is not nothing."""
Probability = Annotated[float, Ge(0), Le(1)]
Decay = Annotated[float, Ge(0), Lt(1)]
"""Factor by which something decays, or the probability of leaving something out."""

C = TypeVar("C", bound="Config")
T = TypeVar("T")

OnResume = Literal["refuse", "report", "ignore"]
"""Treatment of a setting that was changed between a run and its resumption (`run.settings`).

refuse: do not resume, because it would be another run. report: resume, and report the change, which acts from the next
step on. ignore: resume silently, because no result depends on it, or content is compared in place of a path. A class
names the treatment of its fields, and a field may have its own (`setting`).
"""


def setting(default: T, on_resume: OnResume) -> T:
    """Return a field with another treatment on resume than its class has."""
    made: Any = field(default=default, metadata={"on_resume": on_resume})
    return made  # type: ignore[no-any-return]


def shortened(value: Any) -> str:
    """Return `value` as Python writes it, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write whole numbers of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}… ({len(text):,} characters)"


class Problem(NamedTuple):
    """One mistake in settings.

    Attributes:
        key: dotted name of the setting.
        what: description of the mistake.
        want: values that would be valid.
        fix: how to fix it.
        loc: place of the wrong value within the setting's: positions in lists, names in mappings.
        unused: whether the only mistake is that nothing reads the setting.
    """

    key: str
    what: str
    want: str = ""
    fix: str = ""
    loc: tuple[int | str, ...] = ()
    unused: bool = False

    def error(self, where: str) -> RecipeError:
        """Return the error that reports the problem at the place `where`."""
        return RecipeError(self.what, want=self.want, fix=self.fix, where=where)


def refuse_if(wrong: object, key: str, what: str, want: str = "", **more: Any) -> tuple[Problem, ...]:
    """Return the problem of the setting `key` if `wrong` is true, else nothing."""
    return (Problem(key, what, want, **more),) if wrong else ()


class UsedWhen(NamedTuple):
    """Condition under which settings are used.

    Attributes:
        names: the settings.
        holds: whether an object of settings uses them.
        want: what makes it use them.
    """

    names: tuple[str, ...]
    holds: Callable[[Any], bool]
    want: str


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Config:
    """Base class for dataclasses of settings.

    Attributes:
        section: dotted name of the recipe section with these settings.
        on_resume: treatment of changes in a resumed run; None for settings of no recipe.
        kinds: type of each field, with its range.
        classes: all classes of settings.
    """

    section: ClassVar[str] = ""
    on_resume: ClassVar[OnResume | None] = None
    kinds: ClassVar[dict[str, Any]]
    classes: ClassVar[list[type["Config"]]] = []
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __init_subclass__(cls, section: str | None = None, on_resume: OnResume | None = None, **others: Any) -> None:
        """Make the class a dataclass; it has section and treatment of its base class where it names none."""
        super().__init_subclass__(**others)
        cls.section = cls.section if section is None else section
        cls.on_resume = on_resume or cls.on_resume
        dataclass(frozen=True)(cls)
        cls.__init__ = _checked(cls.__init__)  # type: ignore[method-assign]
        hints = get_type_hints(cls, include_extras=True)
        cls.kinds = {each.name: hints[each.name] for each in fields(cls)}
        Config.classes.append(cls)

    @classmethod
    def from_checked(cls, values: Mapping[str, Any]) -> Self:
        """Make an object with values that have been checked; other fields have their defaults."""
        settings = object.__new__(cls)
        cls.__init__.__wrapped__(settings, **values)  # type: ignore[attr-defined]
        return settings

    @classmethod
    @cache
    def validator(cls) -> TypeAdapter[dict[str, Any]]:
        """Build the validator of keywords of this class, at the first use: a run needs few classes."""
        make: Any = TypedDict  # mypy reads literals only
        keywords = make(cls.__name__, cls.kinds, total=False)
        keywords.__pydantic_config__ = ConfigDict(
            strict=True, extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True
        )
        with _without_plugins():
            return TypeAdapter(keywords)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Take objects of this class, as the value of a section."""
        return core_schema.is_instance_schema(cls)

    def contradictions(self) -> Iterable[Problem]:
        """Return a problem for each setting that contradicts another of this object."""
        return ()

    def contradictions_in_recipe(self) -> Iterable[Problem]:
        """Return a problem for each setting that is wrong in a recipe alone: a script may bring what it must name."""
        return ()


def _checked(fill: Any) -> Any:
    """Return the constructor `fill` of a dataclass with checks of its arguments."""

    @wraps(fill)
    def init(self: Config, *args: Any, **keywords: Any) -> Any:
        if not (args or keywords):
            return fill(self)  # defaults are valid, and most classes of a run then need no validator
        cls = type(self)
        if len(args) > len(cls.kinds):
            raise TypeError(f"{cls.__name__} takes {len(cls.kinds)} arguments, and {len(args)} were given")
        given = dict(zip(cls.kinds, args, strict=False)) | keywords
        values, problems = check_values(cls, given, cls.section, _unknown_keyword)
        raise_together([problem.error(cls.__name__ if problem.key else "") for problem in problems])
        fill(self, **values)
        raise_together([problem.error(cls.__name__) for problem in self.contradictions()])

    return init


def check_values(
    cls: type[Config], values: Mapping[str, Any], path: str, unknown: Callable[[type[Config], str, str], Problem]
) -> tuple[dict[str, Any], list[Problem]]:
    """Check `values` by the fields of `cls`; return the values in the types of the fields, and the problems.

    There are at most as many problems as an error lists, because a search for the nearest name takes time.

    Args:
        path: dotted name of the section, in errors.
        unknown: returns the problem of a name that a class does not have, by class, section and name.
    """
    errors: dict[str, ErrorDetails] = {}
    try:
        return cls.validator().validate_python({name: _plain(value) for name, value in values.items()}), []
    except ValidationError as error:
        for entry in error.errors(include_url=False):
            errors.setdefault(str(entry["loc"][0]), entry)
    return {}, [
        _wrong_value(cls, name, path, entry, values[name]) if name in cls.kinds else unknown(cls, path, name)
        for name, entry in islice(errors.items(), MAX_LISTED + 1)
    ]


def _wrong_value(cls: type[Config], name: str, path: str, error: ErrorDetails, value: Any) -> Problem:
    """Return the problem of the `value` of the setting `name` that pydantic refuses by `error`."""
    key, kind, fix = f"{path}.{name}".lstrip("."), cls.kinds[name], _nearest_choice(cls.kinds[name], error["input"])
    want = _names_of_classes(kind) or describe(kind)
    if error["type"].startswith(("greater", "less")):
        want = error["msg"].removeprefix("Input should be ")
    if error["input"] is None and getattr(cls, name, None) == "":
        fix = 'write "" for none'
    return Problem(key, f"{key} is {'nothing' if value is None else shortened(value)}", want, fix, error["loc"][1:])


def _unknown_keyword(cls: type[Config], _: str, name: str) -> Problem:
    return Problem("", f"{cls.__name__} has no keyword {name!r}", fix=suggest(cls, name))


def all_contradictions(settings: Config, prefix: str = "") -> Iterator[Problem]:
    """Yield the contradictions in each section of a recipe, and between its sections."""
    for name in settings.kinds:
        if isinstance(section := getattr(settings, name), Config):
            yield from all_contradictions(section, f"{prefix}{name}.")
    for problem in (*settings.contradictions(), *settings.contradictions_in_recipe()):
        yield problem._replace(key=prefix + problem.key)


@contextmanager
def _without_plugins() -> Iterator[None]:
    """Keep pydantic from looking for its plugins, for which it reads the metadata of every installed package."""
    with _OF_ONE_THREAD:
        before = {name: os.environ[name] for name in (PLUGINS_OFF,) if name in os.environ}
        os.environ[PLUGINS_OFF] = "__all__"
        try:
            yield
        finally:
            del os.environ[PLUGINS_OFF]
            os.environ.update(before)


PLUGINS_OFF = "PYDANTIC_DISABLE_PLUGINS"
"""Variable by which pydantic is told to leave plugins out."""
_OF_ONE_THREAD = RLock()
"""Lock of the variable, which belongs to the process."""


class Keywords:
    """Base class of learners and clusters, which refuses unknown keywords and settings of a wrong class."""

    def __new__(cls, *args: Any, **keywords: Any) -> Self:
        """Check the arguments of the constructor.

        Raises:
            RecipeError: arguments are invalid; the error lists all of them.
        """
        if (known := keywords_of(cls)) is not None:
            arguments = dict(zip(known, args, strict=False)) | keywords
            check_keywords(cls.__name__, arguments, known, partial(suggest, cls))
        return super().__new__(cls)


def check_keywords(
    callee: str, arguments: Mapping[str, Any], known: Mapping[str, Any], suggest: Callable[[str], str]
) -> None:
    """Check that `callee` has each keyword, and that settings are of the right class.

    Args:
        callee: name of the class or function.
        arguments: keywords of a call, with their values.
        known: type of each keyword of `callee`.
        suggest: returns advice about an unknown keyword.

    Raises:
        RecipeError: the error lists all keywords that are wrong.
    """
    unknown = [name for name in arguments if name not in known]
    errors = [RecipeError(f"{callee} has no keyword {name!r}", fix=suggest(name)) for name in unknown]
    for name, value in arguments.items():
        classes = classes_in(known.get(name))
        if classes and value is not None and not isinstance(value, classes):
            want = _names_of_classes(known[name])
            errors.append(RecipeError(f"{name} is {shortened(value)}", want=want, where=callee))
    raise_together(errors)


def keywords_of(cls: type) -> dict[str, Any] | None:
    """Return the keywords of the constructor of `cls` and their types, in order, with those passed to a base class.

    Return None if it takes any keyword, as a user's own class with `**others` does.
    """
    kinds: dict[str, Any] = {}
    for base in (base for base in cls.__mro__ if "__init__" in vars(base)):
        parameters = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
        kinds |= {p.name: p.annotation for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        if all(p.kind is not p.VAR_KEYWORD for p in parameters):
            break
        if not base.__module__.startswith(("covey.", "covey_")):  # neither Covey's nor a plugin's
            return None
    return kinds


def suggest(cls: type, name: str, more: Iterable[str] = ()) -> str:
    """Return advice about the unknown keyword `name` of `cls`, or of its function with the keywords `more`."""
    if advice := foreign_names.argument(name) or foreign_names.answer(name, partial(_as_keyword, cls)):
        return advice
    if owners := [f"{owner.__name__}({name}=...)" for owner in _public_classes() if name in owner.kinds]:
        return f"it belongs elsewhere: {' or '.join(owners)}"
    return nearest(name, [*(keywords_of(cls) or ()), *more])


def _as_keyword(preferred: type, path: str) -> str | None:
    """Return the setting `path` of a recipe as a keyword: of the class `preferred` if that has the same section."""
    section, _, name = path.rpartition(".")
    classes = [cls for cls in _public_classes() if cls.section == section]
    owners = [cls for cls in classes if cls is preferred] or classes
    return next((f"{cls.__name__}({name}=...)" for cls in owners if name in cls.kinds), None)


def _public_classes() -> list[type[Config]]:
    return [cls for cls in Config.classes if cls.__name__ in covey.__all__]


def unused_settings(
    config: Config, conditions: Sequence[UsedWhen], by: str, complete: Config | None = None
) -> Iterator[Problem]:
    """Yield a problem for each setting of `config` that was changed and is not used. False is no change.

    Args:
        by: the algorithm or the like that does not use it, in the error.
        complete: the settings that the conditions look at; `config` itself when not given.
    """
    unset = type(config)()
    unused = [(name, row.want) for row in conditions if not row.holds(complete or config) for name in row.names]
    for name, want in unused:
        default = getattr(unset, name, None)
        value = getattr(config, name, default)
        yield from refuse_if(
            value != default and value is not False,
            name,
            f"{f'{config.section}.{name}'.lstrip('.')} is set, and {by} has no use for it",
            f"{'null' if default is None else default}, or {want}",
            unused=True,
        )


@cache
def classes_in(kind: Any) -> tuple[type[Config], ...]:
    """Return the classes of settings that a field of type `kind` may hold."""
    if get_origin(kind) in (Annotated, Union, types.UnionType):
        return tuple(cls for part in get_args(kind) for cls in classes_in(part))
    return (kind,) if isinstance(kind, type) and issubclass(kind, Config) else ()


def settings_in(cls: type[Config], prefix: str = "") -> Iterator[tuple[str, type[Config], str]]:
    """Yield (dotted name, class, name of its field) of every setting in the tree of `cls`, in order."""
    for name, kind in cls.kinds.items():
        if classes := classes_in(kind):
            yield from settings_in(classes[-1], f"{prefix}{name}.")
        else:
            yield prefix + name, cls, name


def leaves(cls: type[Config]) -> dict[str, Any]:
    """Return the type of every setting in the tree of `cls` by dotted name."""
    return {path: owner.kinds[name] for path, owner, name in settings_in(cls)}


def treatments_on_resume(cls: type[Config]) -> dict[str, OnResume | None]:
    """Return the treatment of every setting in the tree of `cls` by dotted name."""
    return {
        path: owner.__dataclass_fields__[name].metadata.get("on_resume", owner.on_resume)
        for path, owner, name in settings_in(cls)
    }


def _names_of_classes(kind: Any) -> str:
    return " or ".join(f"{cls.__name__}(...)" for cls in classes_in(kind))


def _nearest_choice(kind: Any, value: Any) -> str:
    """Return the choice nearest to the wrong `value` of a field of type `kind`; "" if it has no choices."""
    words = [choice for choice in choices(kind) if isinstance(choice, str)]
    return nearest(value, words) if words and isinstance(value, str) else ""


def _plain(value: Any) -> Any:
    """Convert an array without axes to its number, a list to a tuple, and a path to text."""
    if type(value) in (list, tuple):
        return tuple(map(_plain, value))
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    try:
        return value.item() if getattr(value, "ndim", None) == 0 else value
    except Exception:  # an array that holds no number, such as a JAX key
        return value
