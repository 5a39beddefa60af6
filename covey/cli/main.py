"""Run the command `covey`: a command line in, an exit code out.

`parse` finds the command and sorts its words by the table of commands, and imports nothing that needs JAX, so that help
and errors appear at once. Exit codes: 0 done, 1 a bug in Covey (with its traceback), 2 a mistake in the user's input,
75 a run was stopped by a signal and can resume from a checkpoint, 130 stopped with Ctrl-C, 143 by SIGTERM, without a
checkpoint to resume from.
"""

import errno
import io
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pkgutil import resolve_name

from covey import __version__
from covey.cli import help
from covey.cli.commands import COMMANDS
from covey.cli.parse import before_dashes, read_line
from covey.config.processes import LAUNCHER, PEER_LOST
from covey.display import echo
from covey.errors import CoveyError, Stopped, nearest
from covey.registry import offered

Action = Callable[[], int | None]
"""Call that a command line describes. It returns the exit code; None is success."""

_ANOTHER_PLACE = "another place (--out FOLDER says where a run or an export goes), or the right to read and write there"
_ROOM = "make room; a run that has a checkpoint goes on with --resume"
OUTSIDE: dict[int | None, str] = {
    errno.EROFS: _ANOTHER_PLACE,
    errno.EACCES: _ANOTHER_PLACE,
    errno.EPERM: _ANOTHER_PLACE,
    errno.ENOTDIR: "another path: one of its folders is a file",
    errno.EISDIR: "another path, or move the folder: a file is needed there",
    errno.ENAMETOOLONG: "a shorter name",
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
}
"""Fixes for system errors that no bug in Covey causes; all others keep their traceback."""


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line `words` (the process's own when not given); return the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for characters that the terminal's encoding lacks
    if LAUNCHER in os.environ:
        offered("covey.processes", "stop_with_launcher")(os.environ)
    try:
        code = parse(sys.argv[1:] if words is None else words)()
        sys.stdout.flush()
        return code or 0
    except CoveyError as error:
        return _report(error)
    except Stopped as stopped:
        what = "nothing is saved" if stopped.step is None else f"step {stopped.step} is saved"
        print(f"\nstopped by {stopped.signal}; {what}", file=sys.stderr)
        return _end_process(stopped.exit_code) if words is None else stopped.exit_code
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return _end_process(130) if words is None else 130
    except BrokenPipeError:  # the pipe was closed, as in `covey recipes | head`; the flush at exit must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.errno not in OUTSIDE:
            raise
        return _report(CoveyError(str(error.strerror), fix=OUTSIDE[error.errno], where=str(error.filename or "")))


def parse(words: Sequence[str]) -> Action:
    """Return the call that `words` describe, without making it.

    Raises:
        CoveyError: an unknown command or option, or a missing or extra argument.
    """
    name, *rest = words or ("--help",)
    if name in (*help.ASKING, "help"):
        return _parse_help(rest)
    if name == "--version":
        return partial(echo, f"covey {__version__}")
    if name not in COMMANDS:
        raise CoveyError(f"there is no command {name!r}", fix=nearest(name, COMMANDS))
    if set(help.ASKING).intersection(before_dashes(rest)):
        return partial(help.show, COMMANDS[name], rest)
    line = read_line(COMMANDS[name], rest)
    return partial(resolve_name(line.command.function), line)


def _parse_help(words: Sequence[str]) -> Action:
    """Parse the words after `covey --help`: a command, or a topic of the settings of `covey train`."""
    if not words:
        return help.show_overview
    name, topic = (words[0], words[1:]) if words[0] in COMMANDS else ("train", words)
    return partial(help.show, COMMANDS[name], ["--help", *topic])


def _report(error: CoveyError) -> int:
    """Print the error and return the exit code. The process ends here if another process of the run is lost, because
    JAX would wait for it at shutdown.
    """
    echo(str(error), keep="\n", file=sys.stderr)
    stopped: Stopped | None = getattr(error, "stopped", None)
    code = stopped.exit_code if stopped else error.exit_code
    if code == PEER_LOST:
        from covey.parallel import processes  # late: it needs JAX

        processes.here().leave(code)
    return code


def _end_process(code: int) -> int:
    """End the process with `code` without interpreter shutdown: a program that JAX is compiling when a signal comes
    continues to compile in a thread, which would crash when JAX is torn down.

    With several processes each shuts down normally, because they wait for each other; there `code` is returned.
    """
    with suppress(BrokenPipeError):
        sys.stdout.flush()
    if "jax" not in sys.modules or sys.modules["jax"].distributed.is_initialized():
        return code
    os._exit(code)
