"""Strict YAML reader that builds dataclasses.

The result is an instance of a dataclass, or one error that names every mistake with file and line. The reader differs
from YAML 1.1 on purpose: `1e-5` is a number (there text), `no` and `1:30` are text (there false and 90). Duplicate
keys, anchors and custom tags are refused. `override` puts values from the command line into the same tree, so that
the same code checks both. A file may be hostile: its size and the number of reported mistakes are limited.
"""

import re
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from covey.config import foreign_names
from covey.errors import RecipeError, nearest

T = TypeVar("T")

building: ContextVar[bool] = ContextVar("building", default=False)
"""True while `build` makes objects: it collects their mistakes itself."""
MAX_BYTES = 32_768
"""Largest file size in bytes. A recipe with every setting has about 5,000; parsing 100,000 takes a second."""
MAX_LISTED = 20
"""Largest number of problems that one error describes."""
MAX_SHOWN = 200
"""Largest number of characters of a wrong value that an error shows."""


@dataclass(frozen=True)
class Item:
    """A scalar, list or mapping, with its source location.

    Attributes:
        value: the content: None, bool, int, float, str, list of Items, or dict from name to Item.
        where: `file:line`, or the command-line flag.
        key: `file:line` of the key, for an entry of a mapping.
    """

    value: Any
    where: str
    key: str = ""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    """Loader of the core schema of YAML 1.2, without anchors."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if getattr(event, "anchor", None):  # an alias has an anchor too
            raise yaml.composer.ComposerError(None, None, "anchors and aliases are not read", event.start_mark)
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Dumper that quotes text which YAML 1.1 or the loader above would read as something else."""


def text_of(path: Path, name: str) -> str:
    """Read the file at `path`; `name` stands for it in errors.

    Raises:
        RecipeError: the file cannot be read, is not UTF-8, or has more than `MAX_BYTES`.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) <= MAX_BYTES:
            return content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot be read: {error}", where=name) from None
    want = "a recipe: with every setting written out it has about 5,000"
    raise RecipeError(f"the file has more than {MAX_BYTES:,} bytes", want=want, where=name)


def read(text: str, name: str) -> Item:
    """Parse `text` to a tree; an empty document is an empty mapping. `name` stands before the line in errors.

    Raises:
        RecipeError: the text is not YAML, or has a duplicate key, an anchor or a tag.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        raise RecipeError(f"not readable as YAML: {error.problem or error.context}", where=where) from None
    except (yaml.YAMLError, RecursionError) as error:
        raise RecipeError(f"not readable as YAML: {str(error) or 'nested too deep'}", where=name) from None
    return Item({}, f"{name}:1") if node is None else _item(node, name)


def dump(tree: Any) -> str:
    """Convert `tree` (dicts, lists, scalars) to YAML that `read` restores unchanged; keys keep their order."""
    text: str = yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text


def build(cls: type[T], item: Item) -> T:
    """Build the dataclass `cls` (nested ones included) from `item`; missing settings keep their defaults.

    Raises:
        RecipeError: keys are unknown or types are wrong; the error lists all of them.
    """
    builder = _Builder(list(leaves(cls)))
    token = building.set(True)
    try:
        value: T = builder.convert(cls, item, "")
    finally:
        building.reset(token)
    raise_together(builder.problems)
    return value


def override(item: Item, path: str, given: Item) -> Item:
    """Return `item` with the value at the dotted `path` replaced by `given`; missing mappings on the way are added."""
    if item.value is not None and not isinstance(item.value, dict):
        return item  # not a section: `build` reports it
    head, _, rest = path.partition(".")
    entries = dict(item.value or {})
    entries[head] = override(entries.get(head, Item({}, given.where)), rest, given) if rest else given
    return Item(entries, item.where, item.key)


def from_text(kind: Any, text: str, where: str) -> Item:
    """Parse a command-line value for a field of type `kind`: text is taken literally, lists may have commas."""
    inner, optional = _without_none(kind)
    if optional and text.lower() in ("null", "none", "~"):
        return Item(None, where)
    if inner is str or (get_origin(inner) is Literal and all(isinstance(a, str) for a in get_args(inner))):
        return Item(text, where)
    if get_origin(inner) is tuple and not text.startswith("["):
        element = get_args(inner)[0]
        return Item([from_text(element, part.strip(), where) for part in text.split(",") if part.strip()], where)
    try:
        return _relocate(read(text, where), where)
    except RecipeError:
        return Item(text, where)


def leaves(cls: Any, prefix: str = "") -> dict[str, Any]:
    """Return the type of every setting in the dataclass tree `cls` by dotted name, in order."""
    found: dict[str, Any] = {}
    for name, kind in get_type_hints(cls).items():
        found |= leaves(kind, f"{prefix}{name}.") if is_dataclass(kind) else {prefix + name: kind}
    return found


def places(item: Item, prefix: str = "") -> dict[str, str]:
    """Return the source location of every value in the tree by dotted name."""
    if not isinstance(item.value, dict) or not item.value:
        return {prefix.rstrip("."): item.where}
    return {k: v for name, entry in item.value.items() for k, v in places(entry, f"{prefix}{name}.").items()}


def raise_together(problems: Sequence[RecipeError]) -> None:
    """Raise the only problem, or the first `MAX_LISTED` of them as one error; do nothing if there are none."""
    if len(problems) == 1:
        raise problems[0]
    if problems:
        many = len(problems) > MAX_LISTED
        count = f"more than {MAX_LISTED} problems; the first of them:" if many else f"{len(problems)} problems"
        raise RecipeError("\n".join([count, *map(str, problems[:MAX_LISTED])]))


def _item(node: yaml.Node, name: str) -> Item:
    where = f"{name}:{node.start_mark.line + 1}"
    if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
        return _mapping(node, name, where)
    if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
        return Item([_item(child, name) for child in node.value], where)
    if isinstance(node, yaml.ScalarNode) and node.tag in _SCALARS:
        try:
            return Item(_SCALARS[node.tag](node.value), where)
        except ValueError as error:  # `!!int x`, or an integer of thousands of digits
            raise RecipeError(f"not a value: {error}", where=where) from None
    raise RecipeError(f"the tag {node.tag!r} is not read here", want="plain YAML without tags", where=where)


def _mapping(node: yaml.MappingNode, name: str, where: str) -> Item:
    entries: dict[str, Item] = {}
    for key, value in node.value:
        at = f"{name}:{key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode):
            raise RecipeError("a key must be a word", where=at)
        if key.value in entries:
            raise RecipeError(f"{key.value!r} is given twice, first at {entries[key.value].key}", where=at)
        item = _item(value, name)
        entries[key.value] = Item(item.value, item.where, at)
    return Item(entries, where)


def _relocate(item: Item, where: str) -> Item:
    value = item.value
    if isinstance(value, list):
        value = [_relocate(child, where) for child in value]
    elif isinstance(value, dict):
        value = {name: _relocate(child, where) for name, child in value.items()}
    return Item(value, where)


class _Builder:
    """Converter of Items to typed values; it collects problems, and returns no valid value where it found one."""

    def __init__(self, paths: Sequence[str]):
        self.paths = paths
        self.problems: list[RecipeError] = []

    def convert(self, kind: Any, item: Item, path: str, default: Any = None) -> Any:
        inner, optional = _without_none(kind)
        value = item.value
        if optional and value is None:
            return None
        if is_dataclass(inner) and (value is None or isinstance(value, dict)):  # an empty section is null
            return self.convert_fields(inner, Item(value or {}, item.where), path, default)
        if get_origin(inner) is tuple and isinstance(value, list):
            return tuple(self.convert(get_args(inner)[0], child, path) for child in value)
        if get_origin(inner) is dict and isinstance(value, dict):
            return {n: self.convert(get_args(inner)[1], child, f"{path}.{n}") for n, child in value.items()}
        if get_origin(inner) is Literal and any(value == a and type(value) is type(a) for a in get_args(inner)):
            return value
        if inner is float and type(value) in (int, float) and is_finite(value):
            return float(value)
        if inner in (int, bool, str) and type(value) is inner:
            return value
        self.refuse(lambda: _misfit(kind, item, path))
        return None

    def convert_fields(self, cls: Any, item: Item, path: str, default: Any = None) -> Any:
        """Build `cls`; missing fields are taken from `default`, the parent section's, or else from the class."""
        kinds, before = get_type_hints(cls), len(self.problems)
        defaults = {f.name: _default(f) if default is None else getattr(default, f.name) for f in fields(cls)}
        for name, entry in item.value.items():
            if name not in kinds:
                self.refuse(partial(self.unknown, name, kinds, entry.key or entry.where, path))
        prefix = path and path + "."
        given = {n: self.convert(kinds[n], i, prefix + n, defaults[n]) for n, i in item.value.items() if n in kinds}
        for name, value in defaults.items():
            if value is MISSING and name not in given:
                self.refuse(partial(RecipeError, f"{prefix}{name} is missing", where=item.where))
        return cls(**defaults | given) if len(self.problems) == before else None

    def refuse(self, problem: Callable[[], RecipeError]) -> None:
        """Record a problem. Beyond `MAX_LISTED` no text is built: the nearest name to each of thousands takes long."""
        self.problems.append(problem() if len(self.problems) < MAX_LISTED else RecipeError("not listed"))

    def unknown(self, name: str, choices: Iterable[str], where: str, path: str) -> RecipeError:
        elsewhere = [p for p in self.paths if p.endswith("." + name)]
        fix = f"it belongs elsewhere: {' or '.join(elsewhere)}" if elsewhere else ""
        fix = fix or foreign_names.answer(name, {p: p for p in self.paths}.get) or nearest(name, choices)
        inside = f" in {path}" if path else ""
        return RecipeError(f"there is no setting {_shortened(name)}{inside}", fix=fix, where=where)


def _default(field: Any) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _misfit(kind: Any, item: Item, path: str) -> RecipeError:
    value = item.value
    shown = _SHAPES.get(type(value)) or _shortened(value)
    inner, _ = _without_none(kind)
    fix = 'put quotes around it: "..."' if inner is str and type(value) in (bool, int, float) else ""
    if get_origin(inner) is Literal and isinstance(value, str):
        fix = nearest(value, map(str, get_args(inner)))
    return RecipeError(f"{path or 'the file'} is {shown}", want=describe(kind), fix=fix, where=item.where)


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}… ({len(text):,} characters)"


def describe(kind: Any) -> str:
    """Describe the values that a field of type `kind` takes."""
    inner, optional = _without_none(kind)
    if get_origin(inner) is Literal:
        words = ", ".join(str(a) for a in get_args(inner))
    elif get_origin(inner) is tuple:
        words = f"a list [a, b] of: {describe(get_args(inner)[0])}"
    elif get_origin(inner) is dict:
        words = f"a mapping {{name: value}} of: {describe(get_args(inner)[1])}"
    else:
        words = _WORDS.get(inner, "a mapping (name: value)")
    return words + (" (or null)" if optional else "")


def is_finite(value: float) -> bool:
    """Return whether `value`, which may be an integer of any size, is a finite number that a float can hold."""
    return abs(value) <= sys.float_info.max


def _without_none(kind: Any) -> tuple[Any, bool]:
    if get_origin(kind) in (Union, types.UnionType):
        rest = [a for a in get_args(kind) if a is not type(None)]
        assert len(rest) == 1, f"a setting is one type, or one type and None: {kind}"
        return rest[0], True
    return kind, False


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if text.isprintable() else '"'  # the other styles lose some line breaks, U+0085 among them
    return dumper.represent_scalar(_TAG + "str", text, style=style)


def _float(text: str) -> float:
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


_TAG = "tag:yaml.org,2002:"
_SCALARS: dict[str, Callable[[str], Any]] = {
    _TAG + "null": lambda text: None,
    _TAG + "bool": lambda text: text.lower() == "true",
    _TAG + "int": int,
    _TAG + "float": _float,
    _TAG + "str": str,
}
_SHAPES: dict[type, str] = {dict: "a mapping", list: "a list", type(None): "nothing"}
_WORDS: dict[Any, str] = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}
_PATTERNS = {
    "null": (r"null|Null|NULL|~|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?[0-9]+", list("-+0123456789")),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+0123456789."),
    ),
}
for _name, (_pattern, _first) in _PATTERNS.items():
    for _yaml in (_Loader, _Dumper):
        _yaml.add_implicit_resolver(_TAG + _name, re.compile(rf"(?:{_pattern})\Z"), _first)
_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(list, lambda dumper, data: dumper.represent_sequence(_TAG + "seq", data, flow_style=True))
