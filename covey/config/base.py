"""Base class of all settings: frozen dataclasses that pydantic validates, with the errors of this package.

A class that derives from `Config` is a dataclass. Its fields have strict types, ranges and choices; unknown keywords
are refused; `contradictions` compares its fields with each other. One `RecipeError` reports all mistakes of a call.
NumPy scalars are valid as numbers, lists as tuples, and paths as text. `Keywords` refuses unknown keywords of learners
and clusters with the same errors. This module does not import JAX.
"""

import ast
import difflib
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, field, fields
from enum import StrEnum
from functools import cache, partial, reduce
from itertools import islice, pairwise
from numbers import Number
from operator import getitem
from pathlib import Path
from threading import RLock
from typing import (
    Annotated,
    Any,
    ClassVar,
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
from pydantic_core import ArgsKwargs, CoreSchema, ErrorDetails, SchemaValidator

import covey
from covey.config import foreign_names
from covey.config.kinds import bounds, choices, describe
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


class OnResume(StrEnum):
    """Treatment of a setting that was changed between a run and its resumption (`run.settings`).

    Every setting of a recipe has one, beside its type. That of a section holds for its settings that have none.
    """

    DECISIVE = "decisive"
    """Refuse to resume: it would be another run."""
    REPORTED = "reported"
    """Resume, and report the change, which acts from the next step on."""
    IGNORED = "ignored"
    """Resume without a word: the results do not depend on it, or content is compared in place of a path."""


Decisive = Annotated[T, OnResume.DECISIVE]
Reported = Annotated[T, OnResume.REPORTED]
Ignored = Annotated[T, OnResume.IGNORED]


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
        basic: whether the name or the type is wrong, so that the settings cannot be compared with each other.
        unread: whether the only mistake is that nothing reads the setting.
    """

    key: str
    what: str
    want: str = ""
    fix: str = ""
    loc: tuple[int | str, ...] = ()
    basic: bool = False
    unread: bool = False

    def error(self, where: str) -> RecipeError:
        """Return the error that reports the problem at the place `where`."""
        return RecipeError(self.what, want=self.want, fix=self.fix, where=where)


def problem_if(wrong: object, key: str, what: str, want: str = "", **more: Any) -> tuple[Problem, ...]:
    """Return the problem of the setting `key` alone if `wrong` is true, else nothing."""
    return (Problem(key, what, want, **more),) if wrong else ()


class ReadIf(NamedTuple):
    """Condition under which settings are read.

    Attributes:
        names: the settings.
        holds: whether an object of settings reads them.
        want: what makes it read them.
    """

    names: tuple[str, ...]
    holds: Callable[[Any], bool]
    want: str


class Wording(NamedTuple):
    """Parts of errors that differ between Python and recipes.

    Attributes:
        show: converts a wrong value to text.
        unknown_name: returns the problem of a name that a class of settings does not have, by the class, the dotted
            name of its section and the name.
    """

    show: Callable[[Any], str]
    unknown_name: Callable[[type["Config"], str, str], Problem]


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Config:
    """Base class for dataclasses of settings.

    Attributes:
        section: dotted name of the recipe section with these settings.
        unset: meaning of None in the fields of the base class; "" if those fields are as in the base class.
        kinds: type of each field, with its range.
    """

    section: ClassVar[str] = ""
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    __pydantic_config__ = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)

    unset: ClassVar[str] = ""
    kinds: ClassVar[dict[str, Any]]
    __signature__: ClassVar[inspect.Signature]
    _set_defaults: ClassVar[Callable[..., None]]

    def __init_subclass__(cls, section: str | None = None, unset: str = "", **others: Any) -> None:
        """Make the class a dataclass.

        Args:
            section: dotted name of its section; by default that of its base class.
            unset: meaning of None in fields of the base class, which are None here by default: one sentence.
        """
        super().__init_subclass__(**others)
        cls.section, cls.unset = cls.section if section is None else section, unset
        if unset:
            _make_optional(cls)
        dataclass(frozen=True)(cls)
        cls.__signature__ = inspect.signature(cls)
        cls._set_defaults, cls.__init__ = cls.__init__, Config.__init__  # type: ignore[method-assign]
        names, hints = cls.__dataclass_fields__, get_type_hints(cls, include_extras=True)
        cls.kinds = {name: kind for name, kind in hints.items() if name in names}

    def __init__(self, *args: Any, **keywords: Any) -> None:
        if len(args) > len(self.kinds):
            raise TypeError(f"{type(self).__name__} takes {len(self.kinds)} arguments, and {len(args)} were given")
        if not (args or keywords):
            return self._set_defaults()  # defaults are valid, and most classes of a run then need no validator
        _, problems = validate(type(self), dict(zip(self.kinds, args, strict=False)) | keywords, IN_PYTHON, self)
        raise_together([p.error(type(self).__name__ if p.key in self.kinds else "") for p in problems])

    @classmethod
    @cache
    def validator(cls) -> SchemaValidator:
        """Build the validator of this class and its sections, at the first use: a run needs few classes."""
        with _without_plugins():
            return TypeAdapter(cls).validator  # type: ignore[return-value]  # a plugin's, without which it is built

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema of this class, which also accepts a mapping, unless validation is strict."""
        schema = handler(source)
        handler.resolve_ref_schema(schema).update(strict=False)  # type: ignore[attr-defined]
        return schema

    def contradictions(self) -> Iterable[Problem]:
        """Return a problem for each setting that contradicts another of this object."""
        return ()

    def contradictions_in_recipe(self) -> Iterable[Problem]:
        """Return a problem for each setting that is wrong in a recipe alone: a script may bring what it must name."""
        return ()


def validate(
    cls: type[C], values: Mapping[str, Any], wording: Wording, new: C | None = None
) -> tuple[C, list[Problem]]:
    """Return settings of `cls` with `values`, and everything that is wrong with them.

    A section may be a mapping; its missing settings are those that the section has by default. Wrong names and types
    come first; without any, the settings are compared with each other even if some are out of their range.

    Args:
        new: object whose fields are set; its sections must be objects.
    """
    complete = _complete(cls, values, defaults(cls))
    unchecked = _unchecked(cls, complete)
    try:
        settings = cls.validator().validate_python(
            ArgsKwargs((), complete), strict=None if new is None else True, self_instance=new
        )
        problems = []
    except ValidationError as error:
        settings, problems = unchecked, list(_translate(cls, error, values, wording))
    if not any(problem.basic for problem in problems):
        wrong = {problem.key for problem in problems}
        problems += [p for p in in_sections(unchecked) if p.key not in wrong]
    return settings, problems


def in_sections(settings: Config, in_recipe: bool = False, prefix: str = "") -> Iterator[Problem]:
    """Yield the contradictions of each section of `settings` and of the settings themselves, or those in a recipe."""
    for name in settings.kinds:
        if isinstance(section := getattr(settings, name), Config):
            yield from in_sections(section, in_recipe, f"{prefix}{name}.")
    problems = settings.contradictions_in_recipe() if in_recipe else settings.contradictions()
    yield from (problem._replace(key=prefix + problem.key) for problem in problems)


def _complete(cls: type[Config], values: Mapping[str, Any], start: Mapping[str, Any]) -> dict[str, Any]:
    """Add the settings of `start` that `values` lack, in sections too, and convert values to what pydantic takes."""
    complete = dict(start)
    for name, value in values.items():
        classes = classes_in(cls.kinds.get(name))
        if classes and (value is None or isinstance(value, dict)):
            value = _complete(classes[-1], value or {}, vars(start[name]))
        complete[name] = _plain(value)
    return complete


def _unchecked(cls: type[C], values: Mapping[str, Any]) -> C:
    """Make an object of `cls` with `values` as they are, its sections included."""
    sections = {name: classes for name in values if (classes := classes_in(cls.kinds.get(name)))}
    mappings = {name: sections[name][-1] for name in sections if isinstance(values[name], dict)}
    return without_check(cls, {**values, **{name: _unchecked(kind, values[name]) for name, kind in mappings.items()}})


def _translate(
    cls: type[Config], error: ValidationError, values: Mapping[str, Any], wording: Wording
) -> Iterator[Problem]:
    """Yield a problem for the first error of pydantic in each setting, wrong names and types before ranges.

    No more are yielded than an error lists, since to find the nearest name for each of thousands takes long.
    """
    errors: dict[tuple[str, ...], tuple[type[Config], Sequence[int | str], ErrorDetails]] = {}
    for entry in sorted(error.errors(include_url=False), key=lambda entry: entry["type"] in _RANGES):
        if place := _split(cls, entry["loc"]):
            errors.setdefault(place[1], (place[0], place[2], entry))
    for names, (owner, loc, entry) in islice(errors.items(), MAX_LISTED + 1):
        *sections, name = names
        if entry["type"] == "unexpected_keyword_argument":
            yield wording.unknown_name(owner, ".".join(sections), name)._replace(basic=True)
            continue
        key, kind = ".".join(names), owner.kinds[name]
        what = f"{f'{cls.section}.{key}'.lstrip('.')} is {wording.show(reduce(getitem, names, values))}"
        if entry["type"] in _RANGES:
            yield Problem(key, what, _range_in_words(kind, entry))
        else:
            yield Problem(
                key,
                what,
                _classes(kind) if entry["type"] == "dataclass_exact_type" else describe(kind),
                _fix(owner, name, entry),
                tuple(loc),
                basic=True,
            )


def _split(
    cls: type[Config], loc: Sequence[int | str]
) -> tuple[type[Config], tuple[str, ...], Sequence[int | str]] | None:
    """Split a place of pydantic into class and dotted name of a setting, and the place in its value.

    Return None for a place in a class of a union that is not the last one: that has all settings of the others.
    """
    names: list[str] = []
    while loc:
        name, *loc = loc
        names.append(str(name))
        classes = classes_in(cls.kinds.get(str(name)))
        if len(classes) > 1 and loc:
            branch, *loc = loc
            if branch != classes[-1].__name__:
                return None
        if not classes or not loc:
            break
        cls = classes[-1]
    return cls, tuple(names), loc


IN_PYTHON = Wording(
    shortened, lambda cls, _, name: Problem(name, f"{cls.__name__} has no keyword {name!r}", fix=suggest(cls, name))
)


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

_RANGES = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")


def _make_optional(cls: type[Config]) -> None:
    """Declare the fields of the base class of `cls` again, with None as a value and as the default."""
    for name, kind in cls.kinds.items():
        cls.__annotations__[name] = kind | None
        setattr(cls, name, None)


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
            errors.append(RecipeError(f"{name} is {shortened(value)}", want=_classes(known[name]), where=callee))
    raise_together(errors)


def keywords_of(cls: type) -> dict[str, Any] | None:
    """Return the keywords of the constructor of `cls` and their types, in order, with those passed to a base class.

    The result is None if it takes any keyword: a user's own class with `**others`.
    """
    if issubclass(cls, Config):
        return cls.kinds
    kinds: dict[str, Any] = {}
    for base in (base for base in cls.__mro__ if "__init__" in vars(base)):
        parameters = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
        kinds |= {p.name: p.annotation for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        if all(p.kind is not p.VAR_KEYWORD for p in parameters):
            break
        if base.__module__.partition(".")[0] != covey.__name__:
            return None
    return kinds


def suggest(cls: type, name: str, more: Iterable[str] = ()) -> str:
    """Return advice about the unknown keyword `name` of `cls`, or of its function with the keywords `more`."""
    known = [*(keywords_of(cls) or ()), *more]
    if advice := foreign_names.argument(name) or foreign_names.answer(name, lambda path: _as_keyword(path, cls)):
        return advice
    if owners := list(_owners(name)):
        return "it belongs elsewhere: " + " or ".join(f"{owner.__name__}({name}=...)" for owner in owners)
    everywhere = {key for other in _public_classes() for key in keywords_of(other) or ()}
    for close in difflib.get_close_matches(name, sorted(everywhere.union(known)), n=1):
        if close not in known:
            return f"did you mean {next(_owners(close)).__name__}({close}=...)?"
    return nearest(name, known)


def _owners(name: str) -> Iterator[type]:
    """Return the classes that take the keyword `name`, except subclasses of another of them."""
    having = [cls for cls in _public_classes() if name in (keywords_of(cls) or ())]
    return (cls for cls in having if not any(cls is not other and issubclass(cls, other) for other in having))


def _public_classes() -> list[type]:
    """Return the public classes whose keywords are checked, as far as they are imported."""
    classes: list[type] = [Config, Keywords]
    for cls in classes:  # the list grows
        classes += cls.__subclasses__()
    public = {*covey.__all__}
    return [cls for cls in dict.fromkeys(classes) if cls.__name__ in public and not inspect.isabstract(cls)]


def _as_keyword(path: str, preferred: type) -> str | None:
    """Return the setting `path` of a recipe as a keyword: of the class `preferred` if that has the same section."""
    section, _, name = path.rpartition(".")
    classes = [cls for cls in _public_classes() if getattr(cls, "section", None) == section]
    owners = [preferred] if preferred in classes else classes
    return next((f"{cls.__name__}({name}=...)" for cls in owners if name in (keywords_of(cls) or ())), None)


def unread_settings(
    config: Config, conditions: Sequence[ReadIf], by: str, complete: Config | None = None
) -> Iterator[Problem]:
    """Yield a problem for each setting of `config` that was changed and is not read. False is no change.

    Args:
        by: the algorithm or the like that does not read it, in the error.
        complete: the settings that the conditions look at; `config` itself when not given.
    """
    unread = [(name, row.want) for row in conditions if not row.holds(complete or config) for name in row.names]
    for name, want in unread:
        default = defaults(type(config)).get(name)
        value = getattr(config, name, default)
        yield from problem_if(
            value != default and value is not False,
            name,
            f"{f'{config.section}.{name}'.lstrip('.')} is set, and {by} has no use for it",
            f"{'null' if default is None else default}, or {want}",
            unread=True,
        )


def defaults(cls: type[Config]) -> dict[str, Any]:
    """Return the default of each field of `cls` that has one."""
    values = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(cls)}
    return {name: value for name, value in values.items() if value is not MISSING}


def without_check(cls: type[C], values: Mapping[str, Any]) -> C:
    """Return an object of `cls` with the values of all of its fields, which have been checked before."""
    settings = object.__new__(cls)
    vars(settings).update(values)
    return settings


def is_plain(value: Any) -> bool:
    """Return whether `value` is data or settings, and not another object such as an optax transformation."""
    return isinstance(value, (str, bytes, Number, list, Mapping, types.NoneType, Config)) or type(value) is tuple


@cache
def classes_in(kind: Any) -> tuple[type[Config], ...]:
    """Return the classes of settings that a field of type `kind` may hold."""
    if get_origin(kind) in (Annotated, Union, types.UnionType):
        return tuple(cls for part in get_args(kind) for cls in classes_in(part))
    return (kind,) if isinstance(kind, type) and issubclass(kind, Config) else ()


def settings_in(
    cls: type[Config], prefix: str = "", outer: tuple[Any, ...] = ()
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the dotted name of every setting in the tree of `cls`, with the types of its sections and of itself."""
    for name, kind in cls.kinds.items():
        if classes := classes_in(kind):
            yield from settings_in(classes[-1], f"{prefix}{name}.", (*outer, kind))
        else:
            yield prefix + name, (*outer, kind)


def leaves(cls: type[Config]) -> dict[str, Any]:
    """Return the type of every setting in the tree of `cls` by dotted name, in order."""
    return {path: kinds[-1] for path, kinds in settings_in(cls)}


def on_resume(cls: type[Config]) -> dict[str, OnResume | None]:
    """Return the treatment of every setting in the tree of `cls` by dotted name, None where it has none."""
    return {
        path: next(
            (m for k in reversed(kinds) for m in getattr(k, "__metadata__", ()) if isinstance(m, OnResume)), None
        )
        for path, kinds in settings_in(cls)
    }


def explanations(cls: type[Config]) -> dict[str, str]:
    """Return the string under each field of a class of settings, inherited ones included."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if issubclass(base, Config):
            inherited = {name: f"{text} {base.unset}" for name, text in texts.items()} if base.unset else texts
            texts = inherited | _in_body(_class_definitions(base.__module__)[base.__qualname__])
    return texts


@cache
def _class_definitions(module: str) -> dict[str, ast.ClassDef]:
    """Return the syntax tree of each class in the source of `module`."""
    tree = ast.parse(Path(str(sys.modules[module].__file__)).read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _in_body(cls: ast.ClassDef) -> dict[str, str]:
    return {
        field.target.id: " ".join(str(after.value.value).split())
        for field, after in pairwise(cls.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    }


def _range_in_words(kind: Any, error: ErrorDetails) -> str:
    limits = bounds(kind)
    if error.get("ctx", {}).get("le") != MAX_INT and limits.get(Le) == MAX_INT:
        del limits[Le]
    words = {Ge: "at least", Gt: "more than", Le: "at most", Lt: "less than"}
    return " and ".join(f"{words[limit]} {value}" for limit, value in limits.items())


def _classes(kind: Any) -> str:
    return " or ".join(f"{cls.__name__}(...)" for cls in classes_in(kind))


def _fix(owner: type[Config], name: str, error: ErrorDetails) -> str:
    """Return advice about the wrong value of the setting `name` of `owner`; "" if there is none."""
    if error["input"] is None and defaults(owner).get(name) == "":
        return 'write "" for none'
    return _nearest_choice(owner.kinds[name], error)


def _nearest_choice(kind: Any, error: ErrorDetails) -> str:
    """Return the choice nearest to the wrong value of a field of type `kind`; "" if it has no choices."""
    words = [choice for choice in choices(kind) if isinstance(choice, str)]
    return nearest(error["input"], words) if words and isinstance(error["input"], str) else ""


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
