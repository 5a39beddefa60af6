"""Process that renders chat templates for `templates`: one JSON request a line on stdin, one answer a line on stdout.

The sandbox keeps a template from Python. It does not keep it from computing without end or filling the memory: a list
of two of itself, forty times, is written out in terabytes, and a filter may be quadratic. So the process allows itself
`MAX_SECONDS` of computing a request, after which the system ends it wherever it is, and `MAX_MEMORY` bytes. Computing
time does not pass while other programs have the processor, so a busy machine refuses nothing that an idle one takes.
"""

import json
import random
import re
import resource
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_SECONDS = 1.0
"""Most computing time of one request. A long chat takes some hundredths."""
MAX_MEMORY = 1 << 29
"""Bytes of this process."""
MEMORY = f"it takes more than {MAX_MEMORY >> 20} MiB of memory"
"""What is said when it would be more."""
MAX_RENDERED = 1_000_000
"""Longest rendered prompt, in characters."""
MAX_REASON = 500
"""Longest account of an error, in characters: a template may raise with a text of any length."""
TODAY = datetime(2024, 7, 26)
"""The date a template sees: Llama 3's own fallback. With the real one a run resumed tomorrow has other prompts."""


def main(seconds: float = MAX_SECONDS) -> None:
    """Answer requests until stdin ends."""
    with suppress(ValueError, OSError):  # macOS sets no such limit: there the computing time has to do
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        answer = answered(line)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(answer + b"\n")
        sys.stdout.buffer.flush()


def answered(line: bytes) -> bytes:
    """The answer to a request: `text`, or `refused` with the reason, the template's `line` where there is one, and
    whether it went beyond a `limit`.
    """
    request = json.loads(line)
    found: dict[str, Any] = {}
    try:
        template = compiled(request["source"], request["mark"], tuple(request["controls"]))
        if request["values"] is not None:
            found = {"text": rendered(template, request["values"])}
    except Exception as error:  # the checkpoint's code: whatever it does wrong, say so and stop
        lineno = error.lineno if isinstance(error, TemplateSyntaxError) else None
        reason = MEMORY if isinstance(error, MemoryError) else str(error) or type(error).__name__
        limit = isinstance(error, MemoryError | OverflowError | RecursionError | SecurityError)
        found = {"refused": reason[:MAX_REASON], "line": lineno, "limit": limit}
    return json.dumps(found).encode()


@lru_cache(maxsize=64)
def compiled(source: str, mark: str, controls: Sequence[str]) -> Template:
    """The template, in which `mark` stands on both sides of every control token that its own text spells."""
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
    if mark and controls:
        longest_first = sorted(controls, key=len, reverse=True)
        environment.marked = re.compile(f"({'|'.join(map(re.escape, longest_first))})"), rf"{mark}\1{mark}"
    del environment.globals["lipsum"]  # draws at random
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": TODAY.strftime,
        "dict": lambda *args, **kwargs: dict(*args, **kwargs),
        "namespace": _Namespace,
    }
    return environment.from_string(source)


def rendered(template: Template, values: Mapping[str, Any]) -> str:
    """The template's text for `values`, the same whenever it is asked for."""
    random.seed(0)  # for the filter `random`
    return _capped(template.generate(values))


def _capped(pieces: Iterable[str]) -> str:
    out, size = [], 0
    for piece in pieces:
        size += len(piece)
        if size > MAX_RENDERED:
            raise SecurityError(f"what it writes is longer than {MAX_RENDERED} characters")
        out.append(piece)
    return "".join(out)


class _Sandbox(ImmutableSandboxedEnvironment):
    marked: tuple[re.Pattern[str], str] | None = None
    """What to put a mark around in the template's own text, and the replacement with its marks."""

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        if self.marked is not None:
            pattern, replacement = self.marked
            for data in tree.find_all(nodes.TemplateData):
                data.data = pattern.sub(replacement, data.data)
            for const in tree.find_all(nodes.Const):
                if isinstance(const.value, str):
                    const.value = pattern.sub(replacement, const.value)
        return tree


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


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # jinja2's own filter escapes HTML characters, which no chat model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> None:
    raise TemplateError(message)


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
