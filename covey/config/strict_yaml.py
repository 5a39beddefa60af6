"""Strict YAML reader that builds settings.

The result is an object of a class of settings, or one error with file and line of all wrong names and values, or else
of all contradictions. The reader differs from YAML 1.1 on purpose: `1e-5` is a number (there text), `no` and `1:30` are
text (there false and 90). Duplicate keys, anchors and custom tags are refused. `override` puts values from the command
line into the same tree, so that the same code checks both. A file may be hostile: its size and the number of reported
mistakes are limited.
"""

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial, reduce
from itertools import accumulate
from operator import getitem
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin

import yaml

from covey.config import foreign_names
from covey.config.base import Config, Problem, all_contradictions, check_values, classes_in, leaves, shortened
from covey.config.kinds import choices, describe, without_none
from covey.errors import RecipeError, nearest, raise_together
from covey.files import check_utf8

C = TypeVar("C", bound=Config)
log = logging.getLogger(__name__)

BUILT_IN = Path(__file__).parent / "recipes"
"""Folder of the built-in recipes, which errors name without it."""
MAX_BYTES = 32_768
"""Largest file size in bytes. A recipe with every setting has about 5,000; parsing 100,000 takes a second."""


@dataclass
class Document:
    """Content of a recipe or of a command line.

    Attributes:
        name: name of the file in errors.
        tree: plain data; settings are a mapping, with one for each section.
        places: where each value is written, by dotted name: `file:line`, or the flag.
    """

    name: str = ""
    tree: Any = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)

    def place(self, key: str, loc: Sequence[int | str] = ()) -> str:
        """Return where the setting `key` is written, or the part at `loc` of its value; "" if it is nowhere."""
        parts = accumulate(loc, "{}.{}".format, initial=key)
        return next((self.places[part] for part in reversed([*parts]) if part in self.places), "")

    def override(self, key: str, value: Any, where: str) -> None:
        """Replace the value of the setting `key`; missing sections are added."""
        tree, (*sections, name) = self.tree, key.split(".")
        for section in sections:
            if not isinstance(tree, dict):
                return  # `build` reports it
            tree[section] = {} if tree.get(section) is None else tree[section]
            tree = tree[section]
        if isinstance(tree, dict):
            tree[name] = value
            self.places = {k: at for k, at in self.places.items() if not k.startswith(f"{key}.")} | {key: where}

    def remove(self, key: str) -> None:
        """Remove the setting `key`, which is there."""
        *sections, name = key.split(".")
        del reduce(getitem, sections, self.tree)[name]


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    """Loader of the core schema of YAML 1.2, without anchors."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if getattr(event, "anchor", None):  # an alias has an anchor too
            raise yaml.composer.ComposerError(None, None, "anchors and aliases are not read", event.start_mark)
        return super().compose_node(parent, index)


_parse = lru_cache(64)(lambda text: _Loader(text).get_single_node())
"""Function from text to its nodes, which nobody changes. A command reads its recipe several times, which takes PyYAML
20 ms for a whole one.
"""


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Dumper that quotes text which YAML 1.1 or the loader above would read as something else."""


def text_of(path: Path) -> str:
    """Read the text of the file at `path`.

    Raises:
        RecipeError: the file cannot be read, is not UTF-8, or has more than `MAX_BYTES`.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        check_utf8(content, str(path), RecipeError)
        if len(content) <= MAX_BYTES:
            return content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot be read: {error}", where=str(path)) from None
    raise RecipeError(
        f"the file has more than {MAX_BYTES:,} bytes",
        want="a recipe: with every setting written out it has about 5,000",
        where=str(path),
    )


def read_file(path: Path) -> Document:
    """Parse the file at `path`; see `text_of` and `read` for errors."""
    return read(text_of(path), path.name if path.parent == BUILT_IN else str(path))


def read(text: str, name: str) -> Document:
    """Parse `text`; without content it is an empty mapping.

    Args:
        name: stands before the line in errors.

    Raises:
        RecipeError: the text is not YAML, or has a duplicate key, an anchor or a tag.
    """
    try:
        node = _parse(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = str(error.problem or error.context)
        raise RecipeError(
            f"not readable as YAML: {problem}",
            fix="spaces in place of tabs" if "'\\t'" in problem else "",
            where=f"{name}:{mark.line + 1}" if mark else name,
        ) from None
    except (yaml.YAMLError, RecursionError) as error:
        raise RecipeError(f"not readable as YAML: {str(error) or 'nested too deep'}", where=name) from None
    except (ValueError, OverflowError):  # PyYAML takes escapes beyond \U0010FFFF for characters
        raise RecipeError("not readable as YAML: an escape names no character", where=name) from None

    document = Document(name, {}, {"": f"{name}:1"})
    if node is not None:
        document.tree = _value(node, "", name, document.places)
    return document


def dump(tree: Any) -> str:
    """Convert `tree` (dicts, lists, scalars) to YAML that `read` restores unchanged; keys keep their order."""
    text: str = yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text


def build(cls: type[C], document: Document, recorded: Mapping[str, str] = MappingProxyType({})) -> C:
    """Build the settings `cls`, with those of its sections, from `document`; missing settings keep their defaults.

    Args:
        recorded: places of the settings in a run folder, by dotted name. Unused and former settings there are left out
            and reported, because an earlier version of Covey may have accepted them.

    Raises:
        RecipeError: the error lists all wrong names and values; if there are none, all contradictions.
    """
    settings, problems = validate_tree(cls, document.tree)
    order = {key: number for number, key in enumerate(document.places)}
    problems = sorted(problems or all_contradictions(settings), key=lambda problem: order.get(problem.key, 0))
    unused = [p for p in problems if p.unused and document.place(p.key) == recorded.get(p.key)]
    for problem in unused:
        _report_left_out(f"{recorded[problem.key]}: {problem.what}: left out")
        document.remove(problem.key)
    if unused:
        return build(cls, document, recorded)
    raise_together([problem.error(document.place(problem.key, problem.loc)) for problem in problems])
    return settings


def validate_tree(
    cls: type[C], tree: Any, root: type[Config] | None = None, path: str = "", start: C | None = None
) -> tuple[C, list[Problem]]:
    """Return settings of `cls` from a mapping, and its wrong names and values; with any, the settings are `start`.

    Args:
        tree: the mapping; sections are mappings, or None without settings.
        root: class of the whole recipe, in which a wrong name is looked for; `cls` when not given.
        path: dotted name of the section.
        start: values of missing settings, by default those of the class.
    """
    start, root = start or cls(), root or cls
    if not isinstance(tree, dict):
        return start, [Problem(path, f"{path or 'the file'} is {shortened(tree)}", describe(dict))]
    given, problems = dict(tree), list[Problem]()
    for name, value in tree.items():
        if classes := classes_in(cls.kinds.get(name)):
            inner = {} if value is None else value
            where = f"{path}.{name}".lstrip(".")
            given[name], wrong = validate_tree(classes[-1], inner, root, where, getattr(start, name))
            problems += wrong
    values, wrong = check_values(cls, given, path, partial(_unknown_name, root))
    return (start if problems or wrong else cls.from_checked(vars(start) | values)), [*problems, *wrong]


@cache  # a command loads a recipe several times
def _report_left_out(text: str) -> None:
    log.warning(text)


def from_text(kind: Any, text: str) -> Any:
    """Parse a command-line value for a field of type `kind`: text is taken literally, lists may have commas."""
    inner, optional = without_none(kind)
    if optional and text.lower() in ("null", "none", "~") and text not in choices(inner):
        return None
    if inner is str or (get_origin(inner) is Literal and all(isinstance(a, str) for a in get_args(inner))):
        return text
    if get_origin(inner) is tuple and not text.startswith("["):
        return [from_text(get_args(inner)[0], part.strip()) for part in text.split(",") if part.strip()]
    try:
        return read(text, "").tree
    except RecipeError:
        return text


def _value(node: yaml.Node, path: str, name: str, places: dict[str, str]) -> Any:
    """Return the value of `node`, and record where it and its parts are: a part of a mapping is at its key."""
    where = f"{name}:{node.start_mark.line + 1}"
    places.setdefault(path, where)
    if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
        return _mapping(node, path, name, places)
    if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
        return [_value(part, f"{path}.{number}", name, places) for number, part in enumerate(node.value)]
    if isinstance(node, yaml.ScalarNode) and node.tag in _SCALARS:
        try:
            return _SCALARS[node.tag](node.value)
        except ValueError as error:  # `!!int x`, or an integer of thousands of digits
            raise RecipeError(f"not a value: {error}", where=where) from None
    raise RecipeError(f"the tag {node.tag!r} is not read here", want="plain YAML without tags", where=where)


def _mapping(node: yaml.MappingNode, path: str, name: str, places: dict[str, str]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in node.value:
        where = f"{name}:{key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode):
            raise RecipeError("a key must be a word", where=where)
        inner = f"{path}.{key.value}".lstrip(".")
        if key.value in tree:
            raise RecipeError(
                f"{key.value!r} is given twice, first at {places[inner]}", fix="leave one of them out", where=where
            )
        places[inner] = where
        tree[key.value] = _value(value, inner, name, places)
    return tree


def _unknown_name(root: type[Config], cls: type[Config], section: str, name: str) -> Problem:
    """Return the problem of a `name` that `cls`, a section of the recipe `root`, does not have."""
    paths = list(leaves(root))
    elsewhere = [path if "." in path else f"{path}, in no section" for path in paths if path.split(".")[-1] == name]
    fix = f"it belongs elsewhere: {' or '.join(elsewhere)}" if elsewhere else _nested(name, section, paths)
    fix = fix or foreign_names.answer(f"{section}.{name}", {path: path for path in paths}.get)
    inside = f" in {section}" if section else ""
    return Problem(
        f"{section}.{name}".lstrip("."),
        f"there is no setting {shortened(name)}{inside}",
        fix=fix or nearest(name, cls.kinds),
        unused=fix.startswith(foreign_names.NO_USE),
    )


def _nested(name: str, path: str, paths: Iterable[str]) -> str:
    """Return the fix for a key `name` in the section `path` that is a dotted name of a setting; "" if it is none.

    >>> _nested("grpo.beta", "", ["grpo.beta"])
    'write it nested, or as grpo: {beta: VALUE}'
    """
    if "." not in name or f"{path}.{name}".lstrip(".") not in paths:
        return ""
    *sections, last = name.split(".")
    return f"write it nested, or as {''.join(f'{one}: {{' for one in sections)}{last}: VALUE{'}' * len(sections)}"


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
