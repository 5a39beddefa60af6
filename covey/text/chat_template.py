"""Chat templates: the checkpoint's own jinja2 code, run in a sandbox in a process of its own.

A template is untrusted code from the checkpoint, so it gets plain text only and cannot reach Python. Its length, its
output, its CPU time and its memory are limited. The system enforces the last two: it kills the rendering process
(`template_child`) that exceeds them, and the next request starts another. One process serves all templates, one request
at a time. Names and filters are those that templates written for Hugging Face expect, with one deviation: the date is
fixed.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from covey.errors import DataError, WeightsError

MAX_TEMPLATE_LENGTH = 100_000
"""Largest length of a template, in characters."""
MAX_SECONDS = 1.0
"""Limit of the CPU seconds for compiling a template, and for one rendering. A long chat takes some hundredths."""


def check(source: str) -> str:
    """Return the template `source` after checking that it compiles.

    Raises:
        WeightsError: the template is too long, or does not compile within the limits.
    """
    if len(source) > MAX_TEMPLATE_LENGTH:
        raise WeightsError(
            f"the model's chat template has {len(source)} characters", want=f"{MAX_TEMPLATE_LENGTH} at most"
        )
    try:
        answer = _process.request({"source": source, "mark": "", "controls": [], "values": None})
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
        answer = _process.request(request)
    except ChildProcessError as error:
        raise DataError(f"the model's chat template {error}", fix=FIX_LENGTH) from error
    if "refused" in answer:
        what = f"the model's chat template refused these messages: {answer['refused']}"
        raise DataError(what, fix=FIX_LENGTH if answer["limit"] else FIX_ROLES)
    text: str = answer["text"]
    return text


FIX_LENGTH = "use another template, or shorter messages"
FIX_ROLES = "check the roles and their order; many models want user and assistant in turn, some take no system"


class _RenderProcess:
    """The rendering process, started on first use and restarted after it has ended. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def request(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send `request` to the process and return its response.

        Raises:
            ChildProcessError: the process ended while handling it; the message reads on from "the template".
        """
        line = json.dumps(request).encode() + b"\n"
        with self._lock:
            if self._process is None or self._process.poll() is not None:  # not yet started, or killed from outside
                self._end()
                self._process = self._start()
            try:
                answer = self._exchange(self._process, line)
            except BaseException:  # a late response would be taken for that of the next request
                self._end()
                raise
            if answer:
                found: dict[str, Any] = json.loads(answer)
                return found
            code = self._process.wait()
            self._end()
        if code == -signal.SIGPROF:
            raise ChildProcessError(f"takes more than {MAX_SECONDS:g} s of computing time: it may not end")
        raise ChildProcessError(f"ended the process that renders it (exit code {code})")

    def end(self) -> None:
        """End the process, if there is one."""
        with self._lock:
            self._end()

    def _start(self) -> "subprocess.Popen[bytes]":
        path = os.pathsep.join(filter(None, sys.path))
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "covey.text.template_child", str(MAX_SECONDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the run, which may have to finish a step
            env={**os.environ, "PYTHONPATH": path},
        )

    def _exchange(self, process: "subprocess.Popen[bytes]", line: bytes) -> bytes:
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended: reading returns nothing
            process.stdin.write(line)
            process.stdin.flush()
        return process.stdout.readline()

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()  # which closes the pipes, also where a request was not read in full
            self._process = None


_process = _RenderProcess()
atexit.register(lambda: _process.end())


def _reset_after_fork() -> None:
    """Give a forked process a child of its own: two cannot share one pair of pipes, or one lock."""
    global _process
    _process = _RenderProcess()


os.register_at_fork(after_in_child=_reset_after_fork)
