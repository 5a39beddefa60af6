"""Make text safe to show: on the terminal, in logs, in trackers and reports.

Text from models, data and file names is untrusted. Characters that are not printable are shown as escapes, so that no
text can move the cursor, colour the screen or change the writing direction; secrets of the environment are masked.

The package reports through the loggers of its modules, below `covey`; a command shows their records with `show_log`.
"""

import errno
import io
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

from covey.errors import RecipeError

if TYPE_CHECKING:
    from rich.console import Console

SECRET_NAME = re.compile("KEY|TOKEN|SECRET|PASSWORD|PASSWD", re.I)
"""Pattern of the names of environment variables whose values are secret."""
UNLIMITED = 100_000
"""Width of a line that nothing wraps, in columns."""
BESIDE = " + "
"""Text between the names of phases that go on at once."""
MIN_SECRET_LENGTH = 8
"""Minimum length of a secret, in characters: a value such as `1` would be masked in every number."""


def printable(text: str, keep: str = "") -> str:
    """Return `text` with secrets masked and control, direction and other invisible characters escaped, except those in
    `keep`.

    >>> printable("red \\x1b[31m")
    'red \\\\x1b[31m'
    """
    text = mask_secrets(text)
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode("ascii") for c in text)


def echo(text: str, keep: str = "", file: TextIO | None = None) -> None:
    """Print `text` as `printable` returns it, to standard output when `file` is not given."""
    print(printable(text, keep), file=file, flush=True)


def typed_lines() -> Iterator[str]:
    """Yield the lines that somebody types at a prompt, without white space around them, up to an empty one or the end
    of the input. Invalid bytes are read as U+FFFD.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    with suppress(EOFError):
        while text := input("> ").strip():
            yield text


def make_console(wrap: bool = False, **options: Any) -> "Console":
    """Make a console of rich for standard output.

    A pipe whose reader has left raises `BrokenPipeError`, as `print` does; rich would end the process with exit code 1.

    Args:
        wrap: wrap lines in files and pipes too, after the 80 columns that rich assumes for them.
        options: arguments of rich's class.
    """
    from rich.console import Console  # late: mistakes are answered without it

    class Output(Console):
        def on_broken_pipe(self) -> None:
            if threading.current_thread() is threading.main_thread():  # nothing catches what another thread raises
                raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    console = Output(**options)
    if not wrap and not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = UNLIMITED
    return console


@contextmanager
def show_log(info: Callable[[str], None], warning: Callable[[str], None]) -> Iterator[None]:
    """Show the messages of the package's log inside this context: call `info` with each message of that level, and
    `warning` with each more severe one. The functions must escape the text.

    The root logger gets nothing meanwhile: other libraries configure it, and each message would be shown twice.
    """
    log, handler = logging.getLogger("covey"), _CallbackHandler(info, warning)
    level, propagate = log.level, log.propagate
    log.setLevel(min(logging.INFO, log.getEffectiveLevel()))
    log.propagate = False
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = propagate
        log.setLevel(level)


class _CallbackHandler(logging.Handler):
    """Log handler that calls a function with each message; what the function raises ends the call that logs."""

    def __init__(self, info: Callable[[str], None], warning: Callable[[str], None]):
        super().__init__(logging.INFO)
        self._info, self._warning = info, warning

    def emit(self, record: logging.LogRecord) -> None:
        show = self._warning if record.levelno >= logging.WARNING else self._info
        show(record.getMessage())


def mask_secrets(value: Any) -> Any:
    """Return `value` with every secret of the environment masked in its strings; tuples become lists."""
    return secret_mask()(value)


def secret_mask() -> Callable[[Any], Any]:
    """Return the function `mask_secrets` for many values: the environment is read once."""
    secrets = [secret for _, secret in _secrets()]
    return (lambda value: _masked(value, secrets)) if secrets else lambda value: value


def _masked(value: Any, secrets: Sequence[str]) -> Any:
    if isinstance(value, Mapping):
        return {name: _masked(entry, secrets) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(entry, secrets) for entry in value]
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, "***")
    return value


def check_no_secrets(recipe: str) -> None:
    """Refuse a recipe that holds a secret, because recipes are written to the run folder and sent to trackers.

    Raises:
        RecipeError: a secret was found; the message names the variable, not its value.
    """
    for name, secret in _secrets():
        if secret in recipe:
            raise RecipeError(
                f"the recipe holds the value of the environment variable {name}",
                want="secrets in the environment alone: a recipe is written down with its run",
                fix="take it out; the packages that need it find it in the environment",
            )


def _secrets() -> Iterator[tuple[str, str]]:
    """Yield the name and value of each secret variable. A value that is an existing path is not treated as a secret."""
    for name, value in os.environ.items():
        if SECRET_NAME.search(name) and len(value) >= MIN_SECRET_LENGTH and not os.path.exists(value):
            yield name, value


def safe_format(value: Any, formatter: Callable[[Any], str] = repr) -> str:
    """Return `formatter(value)`, or a text that names its type when that raises."""
    try:
        return formatter(value)
    except (Exception, SystemExit):
        return f"a {type(value).__name__} that cannot be shown"
