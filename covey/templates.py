"""Chat templates: the checkpoint's own jinja2 code, run in a sandbox.

A template comes from whoever made the checkpoint, so it gets plain text and nothing else, cannot reach Python, and is
capped in length, in work, in what it writes and in the values it builds. Names and filters are those that templates
written for Hugging Face expect, with one deviation: the date is fixed.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from math import prod
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.defaults import DEFAULT_FILTERS as FILTERS
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from covey.errors import DataError, WeightsError

MAX_TEMPLATE = 100_000
"""Longest template, in characters."""
MAX_RENDERED = 1_000_000
"""Longest rendered prompt, in characters."""
MAX_VALUE = 100_000_000
"""Largest product of the sizes that a call or filter is given: `'…'.replace('', '…')` may write as much."""
MAX_WORK = 1_000_000
"""Most turns of loops in one rendering; a call counts as `CALL` of them. A long chat takes some thousands."""
CALL = 10
TODAY = datetime(2024, 7, 26)
"""The date a template sees: Llama 3's own fallback. With the real one a run resumed tomorrow has other prompts."""


def parse(source: str) -> Template:
    """Compile a template.

    Raises:
        WeightsError: it is too long or does not parse.
    """
    if len(source) > MAX_TEMPLATE:
        raise WeightsError(f"the model's chat template has {len(source)} characters", want=f"{MAX_TEMPLATE} at most")
    try:
        return _environment().from_string(source)
    except TemplateSyntaxError as error:
        raise WeightsError(f"line {error.lineno} of the model's chat template does not parse: {error}") from error


def render(template: Template, values: Mapping[str, Any]) -> str:
    """The template's text.

    Raises:
        DataError: it refuses the values (many do, for an unexpected role), fails on them or writes too much.
    """
    before = _work.set([MAX_WORK])
    try:
        return _capped(template.generate(values))
    except DataError:
        raise
    except Exception as error:  # the checkpoint's code: whatever it does wrong, say so and stop
        raise DataError(
            f"the model's chat template refused these messages: {error}",
            fix="check the roles and their order; many models want user and assistant in turn, some take no system",
        ) from error
    finally:
        _work.reset(before)


def _capped(pieces: Iterable[str]) -> str:
    out, size = [], 0
    for piece in pieces:
        size += len(piece)
        if size > MAX_RENDERED:
            raise DataError(f"the rendered chat is longer than {MAX_RENDERED} characters", fix="shorten the messages")
        out.append(piece)
    return "".join(out)


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, which also refuses to work without end and to build huge values: `'x' * 10**9` would fill the
    memory, and two loops in each other the night.
    """

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("** may make too large a value")
        if operator == "%":
            _refuse_wide(left)
        if operator == "*":
            _refuse_huge([_size(side) if hasattr(side, "__len__") else side for side in (left, right)], MAX_RENDERED)
        if operator == "+":
            _refuse_huge([_size(left) + _size(right)], MAX_RENDERED)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        _spend(CALL)
        _refuse_huge_call([getattr(__obj, "__self__", None), *args, *kwargs.values()])
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)  # None but for `format` and `format_map`
        if wrapped is not None:
            _refuse_wide(value.__self__)
        return wrapped

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """As jinja2, with every loop counted and every `~` measured."""
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "counted", [], [], None, None)
        for concat in tree.find_all(nodes.Concat):
            concat.nodes = [nodes.Filter(nodes.List(concat.nodes), "measured", [], [], None, None)]
        return tree


_work: ContextVar[list[int]] = ContextVar("_work")
"""What is left of `MAX_WORK` in this rendering."""


def _spend(work: int) -> None:
    left = _work.get()
    left[0] -= work
    if left[0] < 0:
        raise SecurityError(f"it does not end: more than {MAX_WORK:,} turns of its loops")


def _counted(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        _spend(1)
        yield value


def _measured(parts: list[Any]) -> str:
    texts = [str(part) for part in parts]
    _refuse_huge([sum(map(len, texts))], MAX_RENDERED)
    return "".join(texts)


def _size(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else 0


def _refuse_huge(factors: Iterable[Any], most: int) -> None:
    if prod(abs(int(f)) for f in factors if isinstance(f, int | float)) > most:
        raise SecurityError("that makes too large a value")


def _refuse_wide(text: Any) -> None:
    """`'%999999999d' % 1`, `'{:999999999}'.format(1)`; `'%*d'`, which takes its width as a value."""
    if isinstance(text, str) and re.search(r"[0-9]{5}|%[^%]*\*", text):
        raise SecurityError("a text to fill in with so large a number may be a width")


def _refuse_huge_call(values: Iterable[Any]) -> None:
    """Widths (`ljust(10**9)`) and what multiplies (`replace`, `join`)."""
    for value in values:
        if isinstance(value, int):
            _refuse_huge([value], MAX_RENDERED)
    _refuse_huge([max(1, _size(value)) for value in values], MAX_VALUE)


def _guarded(filter_: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(filter_)
    def call(*args: Any, **kwargs: Any) -> Any:
        if filter_ is FILTERS["format"]:
            _refuse_wide(args[0])
        _refuse_huge_call([v for v in (*args, *kwargs.values()) if isinstance(v, int | str | list | tuple | dict)])
        return filter_(*args, **kwargs)

    return call


class _Namespace(Namespace):
    """jinja2's `namespace`, without names that Python itself would look up."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` stays free as a keyword, as in jinja2
        for name in dict(*args[1:], **kwargs):
            _public(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _public(name)
        Namespace.__setitem__(self, name, value)


def _public(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"a namespace may not hold {name!r}")


class _Generation(Extension):
    """`{% generation %} … {% endgeneration %}` marks the assistant's part for trainers; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
    del environment.globals["lipsum"]  # writes as much as it is asked for
    environment.filters = {name: _guarded(filter_) for name, filter_ in environment.filters.items()}
    environment.filters |= {"tojson": _guarded(_to_json), "counted": _counted, "measured": _measured}
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": TODAY.strftime,
        "dict": lambda *args, **kwargs: dict(*args, **kwargs),
        "namespace": _Namespace,
    }
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # jinja2's own filter escapes HTML characters, which no chat model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> None:
    raise TemplateError(message)
