"""Chat templates: the checkpoint's own jinja2 code, run in a sandbox in a process of its own.

A template is untrusted code from the checkpoint, so it gets plain text only and cannot reach Python. Its length, its
output, its CPU time and its memory are limited. The system enforces the last two: it kills the rendering process
(`template_child`) that exceeds them, and the next request starts another. One process serves all templates, one request
at a time. Names and filters are those that templates written for Hugging Face expect, with one deviation: the date is
fixed.
"""

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from covey.child import Child
from covey.errors import DataError, WeightsError

HANDLER = "covey.text.template_child:handle_request"
"""Function that the rendering process calls."""
MAX_TEMPLATE_LENGTH = 100_000
"""Largest length of a template, in characters."""
MAX_SECONDS = 1.0
"""Limit of the CPU seconds for compiling a template, and for one rendering. A long chat takes some hundredths."""
MAX_MEMORY = 1 << 29
"""Limit of the rendering process's memory, in bytes."""


def check(source: str) -> str:
    """Check that the template `source` compiles, and return it.

    Raises:
        WeightsError: the template is too long, or does not compile within the limits.
    """
    if len(source) > MAX_TEMPLATE_LENGTH:
        raise WeightsError(
            f"the model's chat template has {len(source)} characters", want=f"{MAX_TEMPLATE_LENGTH} at most"
        )
    try:
        answer = _request({"source": source, "mark": "", "controls": [], "values": None})
    except ChildProcessError as error:
        raise WeightsError(f"the model's chat template does not compile: it {error}") from error
    if "refused" in answer:
        place = f"line {answer['line']} of the model's" if answer["line"] else "the model's"
        raise WeightsError(f"{place} chat template does not parse: {answer['refused']}")
    return source


def render(source: str, values: Mapping[str, Any], *, mark: str = "", controls: Sequence[str] = ()) -> str:
    """Render a template.

    Args:
        source: jinja2 code that `check` accepts.
        values: variables of the template by name, JSON-serializable.
        mark: text put on both sides of each of `controls` that the template itself contains; text from `values` gets
            no marks, so the two can be told apart.
        controls: control tokens as text.

    Raises:
        DataError: the template refuses the values (often an unexpected role), fails on them or exceeds the limits.
    """
    request = {"source": source, "mark": mark, "controls": list(controls), "values": dict(values)}
    try:
        answer = _request(request)
    except ChildProcessError as error:
        raise DataError(f"the model's chat template {error}", fix=FIX_LENGTH) from error
    if "refused" in answer:
        raise DataError(
            f"the model's chat template refused these messages: {answer['refused']}",
            fix=FIX_LENGTH if answer["limit"] else FIX_ROLES,
        )
    text: str = answer["text"]
    return text


FIX_LENGTH = "use another template, or shorter messages"
FIX_ROLES = "check the roles and their order; many models want user and assistant in turn, some take no system"


def _request(request: Mapping[str, Any]) -> dict[str, Any]:
    """Send `request` to the rendering process and return its response.

    Raises:
        ChildProcessError: the process ended while handling it; the message reads on from "the template".
    """
    with _lock:
        _child.reap()
        try:
            return _child.call(request)
        except TimeoutError as error:
            raise ChildProcessError(f"takes {error}: it may not end") from None
        except ChildProcessError as error:
            raise ChildProcessError(f"ended the process that renders it ({error})") from None


def _new_child() -> Child:
    return Child(HANDLER, cpu_seconds=MAX_SECONDS, memory=MAX_MEMORY)


def _reset_after_fork() -> None:
    """Give a forked process a child of its own: two cannot share one socket, or one lock."""
    global _child, _lock
    _child, _lock = _new_child(), threading.Lock()


_child, _lock = _new_child(), threading.Lock()
os.register_at_fork(after_in_child=_reset_after_fork)
