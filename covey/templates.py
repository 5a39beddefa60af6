"""Chat templates: the checkpoint's own jinja2 code, run in a sandbox.

A template comes from whoever made the checkpoint, so it gets plain text and nothing else, cannot reach Python, and is
capped in length, in what it writes and in the values it builds. Names and filters are those that templates written
for Hugging Face expect, with one deviation: the date is fixed.
"""

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from covey.errors import DataError, WeightsError

MAX_TEMPLATE = 100_000
"""Longest template, in characters."""
MAX_RENDERED = 1_000_000
"""Longest rendered prompt, in characters."""
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
    try:
        return _capped(template.generate(values))
    except DataError:
        raise
    except Exception as error:  # the checkpoint's code: whatever it does wrong, say so and stop
        raise DataError(
            f"the model's chat template refused these messages: {error}",
            fix="check the roles and their order; many models want user and assistant in turn, some take no system",
        ) from error


def _capped(pieces: Iterable[str]) -> str:
    out, size = [], 0
    for piece in pieces:
        size += len(piece)
        if size > MAX_RENDERED:
            raise DataError(f"the rendered chat is longer than {MAX_RENDERED} characters", fix="shorten the messages")
        out.append(piece)
    return "".join(out)


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, which also refuses to build huge values: `'x' * 10**9` would fill the memory."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        lengths = [len(side) for side in (left, right) if hasattr(side, "__len__")]
        factors = [side for side in (left, right) if isinstance(side, int)]
        if operator == "**" or (lengths and max(factors, default=0) * max(lengths) > MAX_RENDERED):
            raise SecurityError(f"{operator} makes too large a value")
        return super().call_binop(context, operator, left, right)


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

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
    environment.filters["tojson"] = _to_json
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
