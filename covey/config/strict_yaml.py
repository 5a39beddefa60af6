"""Strict YAML reader that builds settings.

The result is an object of a class of settings, or one error that names every mistake with file and line. The reader
differs from YAML 1.1 on purpose: `1e-5` is a number (there text), `no` and `1:30` are text (there false and 90).
Duplicate keys, anchors and custom tags are refused. `override` puts values from the command line into the same tree, so
that the same code checks both. A file may be hostile: its size and the number of reported mistakes are limited.
"""

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin

import yaml

from covey.config import foreign_names
from covey.config.base import Config, Problem, classes_in, defaults, describe, shortened, without_none
from covey.errors import MAX_LISTED, RecipeError, nearest, raise_together
from covey.files import check_utf8

C = TypeVar("C", bound=Config)
log = logging.getLogger(__name__)

MAX_BYTES = 32_768
"""Largest file size in bytes. A recipe with every setting has about 5,000; parsing 100,000 takes a second."""


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
        check_utf8(content, name, RecipeError)
        if len(content) <= MAX_BYTES:
            return content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot be read: {error}", where=name) from None
    want = "a recipe: with every setting written out it has about 5,000"
    raise RecipeError(f"the file has more than {MAX_BYTES:,} bytes", want=want, where=name)


def read(text: str, name: str, one_line: bool = False) -> Item:
    """Parse `text` to a tree; an empty document is an empty mapping.

    Args:
        name: stands before the line in errors.
        one_line: leave the line out, since `text` is a value of the command line.

    Raises:
        RecipeError: the text is not YAML, or has a duplicate key, an anchor or a tag.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        problem = str(error.problem or error.context)
        fix = "spaces in place of tabs" if "'\\t'" in problem else ""
        raise RecipeError(f"not readable as YAML: {problem}", fix=fix, where=where) from None
    except (yaml.YAMLError, RecursionError) as error:
        raise RecipeError(f"not readable as YAML: {str(error) or 'nested too deep'}", where=name) from None

    def locate(line: int) -> str:
        return name if one_line else f"{name}:{line + 1}"

    return Item({}, locate(0)) if node is None else _item(node, locate)


def dump(tree: Any) -> str:
    """Convert `tree` (dicts, lists, scalars) to YAML that `read` restores unchanged; keys keep their order."""
    text: str = yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text


def build(
    cls: type[C],
    item: Item,
    check: Callable[[C], Iterable[Problem]] = lambda made: (),
    recorded: Mapping[str, str] = MappingProxyType({}),
) -> C:
    """Build the settings `cls`, with those of its sections, from `item`; missing settings keep their defaults.

    Args:
        check: returns problems of the whole, whose keys are dotted names; called when all names and types are right.
        recorded: places of the settings that a run was made with, by dotted name. One of these that nothing reads is
            left out and reported, since an earlier version of Covey may have accepted it: the run did not depend on it.

    Raises:
        RecipeError: the error lists all wrong names and types; if there are none, all other problems.
    """
    builder, where = _Builder(cls), places(item)
    made = builder.section(cls, item, "", {})
    if not builder.basic:
        for problem in check(made):
            builder.add(problem.key, _error(problem, where.get(problem.key, "")), problem)
    if unread := {key: error for key, error in builder.unread.items() if where.get(key, "") == recorded.get(key)}:
        for error in unread.values():
            _report_left_out(f"{error.where}: {error.what}: left out")
        return build(cls, reduce(_without, unread, item), check, recorded)
    raise_together(builder.basic or builder.found)
    return made


def override(item: Item, path: str, given: Item) -> Item:
    """Return `item` with the value at the dotted `path` replaced by `given`; missing mappings on the way are added."""
    if item.value is not None and not isinstance(item.value, dict):
        return item  # not a section: `build` reports it
    head, _, rest = path.partition(".")
    entries = dict(item.value or {})
    entries[head] = override(entries.get(head, Item({}, given.where)), rest, given) if rest else given
    return Item(entries, item.where, item.key)


def _without(item: Item, path: str) -> Item:
    """Return `item` without the value at the dotted `path`, which it has."""
    head, _, rest = path.partition(".")
    others = {name: entry for name, entry in item.value.items() if name != head}
    if rest:
        others[head] = _without(item.value[head], rest)
    return Item(others, item.where, item.key)


@cache  # a command loads a recipe several times
def _report_left_out(text: str) -> None:
    log.warning(text)


def from_text(kind: Any, text: str, where: str) -> Item:
    """Parse a command-line value for a field of type `kind`: text is taken literally, lists may have commas."""
    inner, optional = without_none(kind)
    if optional and text.lower() in ("null", "none", "~"):
        return Item(None, where)
    if inner is str or (get_origin(inner) is Literal and all(isinstance(a, str) for a in get_args(inner))):
        return Item(text, where)
    if get_origin(inner) is tuple and not text.startswith("["):
        element = get_args(inner)[0]
        return Item([from_text(element, part.strip(), where) for part in text.split(",") if part.strip()], where)
    try:
        return read(text, where, one_line=True)
    except RecipeError:
        return Item(text, where)


def leaves(cls: type[Config], prefix: str = "") -> dict[str, Any]:
    """Return the type of every setting in the tree of `cls` by dotted name, in order."""
    found: dict[str, Any] = {}
    for name, kind in cls.kinds.items():
        inner = classes_in(kind)
        found |= leaves(inner[-1], f"{prefix}{name}.") if inner else {prefix + name: kind}
    return found


def places(item: Item, prefix: str = "") -> dict[str, str]:
    """Return the source location of every value in the tree by dotted name."""
    if not isinstance(item.value, dict) or not item.value:
        return {prefix.rstrip("."): item.where}
    return {k: v for name, entry in item.value.items() for k, v in places(entry, f"{prefix}{name}.").items()}


def _item(node: yaml.Node, locate: Callable[[int], str]) -> Item:
    where = locate(node.start_mark.line)
    if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
        return _mapping(node, locate, where)
    if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
        return Item([_item(child, locate) for child in node.value], where)
    if isinstance(node, yaml.ScalarNode) and node.tag in _SCALARS:
        try:
            return Item(_SCALARS[node.tag](node.value), where)
        except ValueError as error:  # `!!int x`, or an integer of thousands of digits
            raise RecipeError(f"not a value: {error}", where=where) from None
    raise RecipeError(f"the tag {node.tag!r} is not read here", want="plain YAML without tags", where=where)


def _mapping(node: yaml.MappingNode, locate: Callable[[int], str], where: str) -> Item:
    entries: dict[str, Item] = {}
    for key, value in node.value:
        at = locate(key.start_mark.line)
        if not isinstance(key, yaml.ScalarNode):
            raise RecipeError("a key must be a word", where=at)
        if key.value in entries:
            what = f"{key.value!r} is given twice, first at {entries[key.value].key}"
            raise RecipeError(what, fix="leave one of them out", where=at)
        item = _item(value, locate)
        entries[key.value] = Item(item.value, item.where, at)
    return Item(entries, where)


class _Builder:
    """Converter of Items to settings, which collects problems.

    Attributes:
        basic: wrong names and types.
        found: all other problems.
        unread: those of `found` that are settings which nothing reads, by dotted name.
    """

    def __init__(self, cls: type[Config]):
        self.paths = list(leaves(cls))
        self.basic: list[RecipeError] = []
        self.found: list[RecipeError] = []
        self.unread: dict[str, RecipeError] = {}

    def section(self, cls: type[C], item: Item, path: str, start: Mapping[str, Any]) -> C:
        """Build `cls`; missing settings are those of `start`, or else the defaults of the class."""
        given, entries = dict(start), item.value or {}  # an empty section is null
        if not isinstance(entries, dict):
            what = f"{path or 'the file'} is {shown(plain(item))}"
            self.basic.append(RecipeError(what, want=describe(dict), where=item.where))
            entries = {}
        for name, entry in entries.items():
            if name not in cls.kinds:
                self.refuse_name(name, cls.kinds, path, entry.key or entry.where)
            elif inner := classes_in(cls.kinds[name]):
                default = given[name] if name in given else defaults(cls)[name]
                given[name] = self.section(inner[-1], entry, f"{path}.{name}".lstrip("."), vars(default))
            else:
                given[name] = plain(entry)
        made = object.__new__(cls)
        for problem in made.assign(given, path, shown):
            error = _error(problem, _where(entries.get(problem.key), problem.loc))
            self.add(f"{path}.{problem.key}".lstrip("."), error, problem)
        return made

    def add(self, key: str, error: RecipeError, problem: Problem) -> None:
        """Record the `error` that says what is wrong with the setting at the dotted name `key`."""
        (self.basic if problem.basic else self.found).append(error)
        if problem.unread:
            self.unread[key] = error

    def refuse_name(self, name: str, choices: Iterable[str], path: str, where: str) -> None:
        """Record an unknown name, up to `MAX_LISTED`: the nearest name to each of thousands takes long."""
        if len(self.basic) > MAX_LISTED:
            return
        elsewhere = [p for p in self.paths if p.endswith("." + name)]
        fix = f"it belongs elsewhere: {' or '.join(elsewhere)}" if elsewhere else _nested(name, path, self.paths)
        fix = fix or foreign_names.answer(f"{path}.{name}", {p: p for p in self.paths}.get) or nearest(name, choices)
        inside = f" in {path}" if path else ""
        self.basic.append(RecipeError(f"there is no setting {shortened(name)}{inside}", fix=fix, where=where))


def _nested(name: str, path: str, paths: Iterable[str]) -> str:
    """Return the fix for a key `name` in the section `path` that is a dotted name of a setting; "" if it is none.

    >>> _nested("grpo.beta", "", ["grpo.beta"])
    'write it nested, or as grpo: {beta: VALUE}'
    """
    if "." not in name or f"{path}.{name}".lstrip(".") not in paths:
        return ""
    *sections, last = name.split(".")
    return f"write it nested, or as {''.join(f'{one}: {{' for one in sections)}{last}: VALUE{'}' * len(sections)}"


def _error(problem: Problem, where: str) -> RecipeError:
    return RecipeError(problem.what, want=problem.want, fix=problem.fix, where=where)


def _where(item: Item | None, loc: Sequence[int | str] = ()) -> str:
    """Return the place of a value, or of the part at `loc` in it; "" if there is none."""
    for step in loc:
        inside = isinstance(item, Item) and isinstance(item.value, (list, dict)) and step != "[key]"
        item = item.value[step] if item and inside else item
    return item.where if item else ""


def shown(value: Any) -> str:
    """Return a wrong value as an error about a file shows it."""
    return "nothing" if value is None else shortened(value)


def plain(item: Item) -> Any:
    """Return the value of `item` without places."""
    if isinstance(item.value, list):
        return [plain(one) for one in item.value]
    return {name: plain(one) for name, one in item.value.items()} if isinstance(item.value, dict) else item.value


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if text.isprintable() else '"'  # the other styles lose some line breaks, U+0085 among them
    return dumper.represent_scalar(_TAG + "str", text, style=style)


_TAG = "tag:yaml.org,2002:"
_SCALARS: dict[str, Callable[[str], Any]] = {
    _TAG + "null": lambda text: None,
    _TAG + "bool": lambda text: text.lower() == "true",
    _TAG + "int": int,
    _TAG + "float": lambda text: float(text.lower().replace(".inf", "inf").replace(".nan", "nan")),
    _TAG + "str": str,
}
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
for _kind in (list, tuple):
    _Dumper.add_representer(_kind, lambda dumper, data: dumper.represent_sequence(_TAG + "seq", data, flow_style=True))
