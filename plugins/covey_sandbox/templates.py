"""The process in which chat templates are rendered (`template_child`).

The system limits its CPU time per request and its memory: it kills the process that exceeds them, and the next request
starts another. One process serves all templates, one request at a time.
"""

import os
import threading
from collections.abc import Mapping
from typing import Any

from covey.text.chat_template import MAX_MEMORY
from covey_sandbox.child import Child

HANDLER = "covey_sandbox.template_child:handle_request"
"""Function that the rendering process calls."""
MAX_SECONDS = 1.0
"""Limit of the CPU seconds for compiling a template, and for one rendering. A long chat takes some hundredths."""


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
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
