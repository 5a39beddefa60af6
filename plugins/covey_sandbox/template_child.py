"""Rendering of chat templates, in a process of its own (`chat_template`).

The sandbox keeps a template from reaching Python, but not from endless loops or from filling the memory: a list nested
forty times, each level holding the one below twice, prints as terabytes, and a filter may be quadratic. So the system
limits the CPU time of a request and the memory of the process. CPU time does not pass while other programs run, so a
busy machine refuses nothing that an idle one accepts.
"""

import json
import random
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from covey.text.chat_template import MAX_MEMORY

MEMORY_ERROR = f"it takes more than {MAX_MEMORY >> 20} MiB of memory"
"""Error text for a template that needs more memory."""
MAX_RENDERED_LENGTH = 1_000_000
"""Largest length of a rendered prompt, in characters."""
MAX_REASON_LENGTH = 500
"""Largest length of an error text, in characters: a template may raise with a text of any length."""
TODAY = datetime(2024, 7, 26)
"""Date for templates: Llama 3's own fallback. With the real date, a run resumed tomorrow would have other prompts."""


def handle_request(request: Mapping[str, Any]) -> dict[str, Any]:
    """Handle a request; respond with `text`, or with `refused` and the reason.

    With `refused` come the template's `line`, if known, and whether it exceeded a `limit`.
    """
    try:
        template = compile_template(request["source"], request["mark"], tuple(request["controls"]))
        return {} if request["values"] is None else {"text": render_template(template, request["values"])}
    except Exception as error:  # untrusted code may raise anything: report it
        reason = MEMORY_ERROR if isinstance(error, MemoryError) else str(error) or type(error).__name__
        return {
            "refused": reason[:MAX_REASON_LENGTH],
            "line": error.lineno if isinstance(error, TemplateSyntaxError) else None,
            "limit": isinstance(error, MemoryError | OverflowError | RecursionError | SecurityError),
        }


@lru_cache(maxsize=64)
def compile_template(source: str, mark: str, controls: Sequence[str]) -> Template:
    """Compile a template, with `mark` put on both sides of every control token that its own text contains."""
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
    if mark and controls:
        longest_first = sorted(controls, key=len, reverse=True)
        environment.marked = re.compile(f"({'|'.join(map(re.escape, longest_first))})"), rf"{mark}\1{mark}"
    del environment.globals["lipsum"]  # draws at random
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": TODAY.strftime,
        "dict": lambda *args, **kwargs: dict(*args, **kwargs),
        "namespace": _Namespace,
    }
    return environment.from_string(source)


def render_template(template: Template, values: Mapping[str, Any]) -> str:
    """Render a template for `values`; equal values always give equal text."""
    random.seed(0)  # for the filter `random`
    out, size = [], 0
    for piece in template.generate(values):
        size += len(piece)
        if size > MAX_RENDERED_LENGTH:
            raise SecurityError(f"what it writes is longer than {MAX_RENDERED_LENGTH} characters")
        out.append(piece)
    return "".join(out)


class _Sandbox(ImmutableSandboxedEnvironment):
    marked: tuple[re.Pattern[str], str] = re.compile("(?!)"), ""
    """Pattern of the control tokens to mark in the template's own text, and the replacement with the marks."""

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        pattern, replacement = self.marked
        for data in tree.find_all(nodes.TemplateData):
            data.data = pattern.sub(replacement, data.data)
        for const in tree.find_all(nodes.Const):
            if isinstance(const.value, str):
                const.value = pattern.sub(replacement, const.value)
        return tree


class _Namespace(Namespace):
    """jinja2's `namespace`, without names that Python itself would look up."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be used as a keyword, as in jinja2
        for name in dict(*args[1:], **kwargs):
            _check_public_name(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public_name(name)
        Namespace.__setitem__(self, name, value)


def _check_public_name(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"a namespace may not hold {name!r}")


class _Generation(Extension):
    """`{% generation %} … {% endgeneration %}` marks the assistant's part for trainers; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # jinja2's own filter escapes HTML characters, which no chat model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
