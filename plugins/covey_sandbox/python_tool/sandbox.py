"""Programs of a model, each executed in a child process of its own with limits: locked in by the kernel
(`native_child`), or in CPython as WebAssembly (`wasm_child`). The folder of a program is made empty, measured while the
program runs, and removed with all its contents.
"""

import errno
import logging
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from covey_sandbox.child import describe_exit, kill_group, start
from covey_sandbox.python_tool import wasm

log = logging.getLogger(f"covey.{__name__}")  # as part of Covey, whose log a run shows

CHILD = Path(__file__).with_name("native_child.py")
PROTECTIONS = ("limits", "capabilities", "landlock", "seccomp")
LANDLOCK_ABI = 6
"""Last version of Landlock's interface that a child uses, of those that its kernel has."""
POLL_SECONDS = 0.05
MAX_DEPTH = 100
"""Maximum depth of folders inside of each other."""
BLOCK = 4096
"""Bytes that a file or a folder counts at least."""


@dataclass(frozen=True)
class Limits:
    """Limits of a program.

    Attributes:
        seconds: time until it is ended, from its start.
        cpu_seconds: computing time; under WebAssembly `fuel` limits it.
        memory: bytes of address space, under WebAssembly of memory.
        file: bytes of one file; under WebAssembly there are none.
        folder: bytes of all its files, about: they are counted 20 times a second.
        output: bytes that it may print.
        fuel: instructions of WebAssembly; about 9e9 are executed in a second.
    """

    seconds: float = 10.0
    cpu_seconds: int = 5
    memory: int = 1 << 29
    file: int = 1 << 20
    folder: int = 1 << 25
    output: int = 1 << 16
    fuel: int = 50_000_000_000


IN_WASM = Limits(seconds=600.0, memory=1 << 28)
"""Limits under WebAssembly. Results that come near the seconds do not repeat, so they are far above what fuel takes."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a program.

    Attributes:
        output: what it printed, standard output and errors together.
        failure: why it failed; empty if it did not.
        protections: names of the protections that held.
        fuel: fuel that it used, under WebAssembly.
        is_fault: whether this machine failed and not the program, which was not executed.
    """

    output: str
    failure: str
    protections: tuple[str, ...] = ()
    fuel: int = 0
    is_fault: bool = False


class Ended(NamedTuple):
    """End of a child: what its program printed, which limit it exceeded, its exit code, what it said of itself, and the
    seconds of computing that it took.
    """

    output: str
    exceeded: str
    code: int
    message: str
    seconds: float


def run_program(program: str, limits: Limits = Limits(), *, only_limits: bool = False) -> Outcome:
    """Execute a program in a child process.

    Args:
        program: source of the program.
        limits: limits of the child.
        only_limits: execute it also where the kernel has no Landlock or no seccomp: it can then read and write the
            files of this user and use the network.
    """
    with _places, own_folder() as folder:
        # Not -I, which would ignore PYTHONHASHSEED: sets would print in another order each time. Unbuffered, so that
        # what was printed stands before the exception, and is there when a limit ends the program.
        command = [sys.executable, "-P", "-s", "-S", "-u", str(CHILD), folder]
        numbers = [str(number) for number in (limits.cpu_seconds, limits.memory, limits.file, LANDLOCK_ABI)]
        words = [*numbers, *(["limits"] if only_limits else [])]
        ended = _run(lambda tell: [*command, str(tell), *words], program, limits, folder)
    protections = tuple(filter(None, ended.message.split(",")))
    missing = [name for name in PROTECTIONS if name not in protections and not only_limits]
    if missing and not ended.exceeded:
        return Outcome(ended.output, f"this system lacks protections: {', '.join(missing)}", protections, is_fault=True)
    return Outcome(ended.output, ended.exceeded or _ending(ended, limits), protections)


def run_in_wasm(program: str, limits: Limits = IN_WASM) -> Outcome:
    """Execute a program in CPython as WebAssembly. The same program has the same outcome each time.

    Args:
        program: source of the program.
        limits: limits; those on computing time and files have no meaning here.

    Raises:
        RecipeError: the packages are missing, or the compiled interpreter cannot be kept safely.
    """
    with _places, wasm.open_module() as module:
        words = (str(limits.fuel), str(limits.memory))
        path = f"/dev/fd/{module}"
        ended = _run(lambda tell: wasm.command("run", path, str(tell), *words), program, limits, descriptors=(module,))
    fuel, _, end = ended.message.partition(" ")
    if not fuel or ended.exceeded:
        failure = ended.exceeded or f"the engine ended with {describe_exit(ended.code)}"
        is_fault = not ended.exceeded and ended.code > 0
        if not is_fault and failure != _flood(limits):
            log.warning(f"{failure}: that depends on this machine, so the run does not repeat bit for bit")
        return Outcome(ended.output, failure, is_fault=is_fault)
    return Outcome(ended.output, _ending_in_wasm(end, limits), fuel=int(fuel))


def _run(
    command: Callable[[int], list[str]],
    program: str,
    limits: Limits,
    folder: str = "",
    descriptors: Sequence[int] = (),
) -> Ended:
    """Run a child until it ends or exceeds a limit.

    Args:
        command: file descriptor to which the child tells about itself → the command.
        program: source of the program, which becomes its stdin.
        limits: limits on seconds, output and files.
        folder: folder of its files.
        descriptors: further file descriptors that it inherits.
    """
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as report:
        try:
            child = _start(command(writing), program, (writing, *descriptors))
        finally:
            os.close(writing)
        with child:
            try:
                output, exceeded = _follow(child, folder, limits)
            finally:
                if child.returncode is None:
                    kill_group(child)  # also processes that it has left behind, while its number is still its own
            seconds = _reap(child)
            os.set_blocking(report.fileno(), False)
            text = (report.read(100) or b"").decode()
    return Ended(output.decode(errors="replace"), exceeded, child.returncode, text, seconds)


def _start(command: list[str], program: str, descriptors: Sequence[int]) -> "subprocess.Popen[bytes]":
    with tempfile.TemporaryFile() as source:
        source.write(program.encode(errors="replace"))
        source.seek(0)
        env = {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
        return start(command, env, descriptors, stdin=source, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def _follow(child: "subprocess.Popen[bytes]", folder: str, limits: Limits) -> tuple[bytes, str]:
    """Follow a child until it ends or exceeds a limit; return its output, and the limit that it exceeded."""
    assert child.stdout is not None
    output, is_open, now = b"", True, time.monotonic()
    end, next_look = now + limits.seconds, now
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while is_open or not _has_ended(child):
            if selector.select(POLL_SECONDS) and is_open:
                piece = os.read(child.stdout.fileno(), limits.output)
                output, is_open = output + piece, bool(piece)
                if not is_open:
                    selector.unregister(child.stdout)
            if len(output) > limits.output:
                return output[: limits.output], _flood(limits)
            if (now := time.monotonic()) > end:
                return output, f"the program took longer than {limits.seconds:g} s"
            if now >= next_look:
                if exceeded := excess(folder, limits.folder):
                    return output, exceeded
                next_look = time.monotonic() + POLL_SECONDS
    return output, ""


def _flood(limits: Limits) -> str:
    return f"the program printed more than {limits.output:,} bytes"


def _has_ended(child: "subprocess.Popen[bytes]") -> bool:
    """Tell whether a child has ended, without reaping it where that is possible: its number stays its own."""
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        return child.poll() is not None
    return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _reap(child: "subprocess.Popen[bytes]") -> float:
    """Wait for the end of a child; return the seconds of computing that it took, infinite where they are not known."""
    if child.returncode is not None:
        return math.inf
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    return used.ru_utime + used.ru_stime


def _ending(ended: Ended, limits: Limits) -> str:
    """Describe the end of a program; "" for exit code 0."""
    if ended.code in (-signal.SIGXCPU, -signal.SIGKILL) and ended.seconds > limits.cpu_seconds - 0.5:
        return f"the program took more than {limits.cpu_seconds} s of computing time"
    if ended.code == -signal.SIGKILL:
        log.warning("a program of the model was killed from outside: this machine may have too little memory")
        return "the program was killed"
    return "" if ended.code == 0 else f"the program ended with {describe_exit(ended.code)}"


def _ending_in_wasm(end: str, limits: Limits) -> str:
    """Describe the end of a program from the child's message; "" for exit code 0."""
    if end == "fuel":
        return f"the program took more than {limits.fuel:,} instructions"
    if end.startswith("exit "):
        return "" if end == "exit 0" else f"the program ended with {end.replace(' ', ' code ')}"
    return f"the program ended the interpreter ({end})"


@contextmanager
def own_folder() -> Iterator[str]:
    """Make an empty folder in a folder that the program cannot write; both are removed at the end."""
    outer = tempfile.mkdtemp(prefix="covey-python-")
    folder = os.path.join(outer, "0")
    try:
        os.mkdir(folder, 0o700)
        yield folder
    finally:
        with suppress(OSError):  # it is not empty
            os.rmdir(folder)
            os.rmdir(outer)
        if os.path.exists(outer):
            _remove(outer)


def _remove(folder: str) -> None:
    """Remove a folder by the system's commands: folders in it may be nested deeper than Python can recurse, and have no
    rights. Neither command follows a link.
    """
    subprocess.run(["chmod", "-R", "u+rwx", folder], stderr=subprocess.DEVNULL)
    removal = subprocess.run(["rm", "-rf", folder], stderr=subprocess.PIPE, text=True)
    if removal.returncode:  # something outside of the run still writes there
        log.warning(f"{folder} cannot be removed: {removal.stderr.strip()[:500]}")


def excess(folder: str, limit: int) -> str:
    """Describe the limit that the files and folders below a folder exceed; "" if none.

    Args:
        folder: the folder; empty for none.
        limit: bytes of all of them, each counted as a block at least.
    """
    total = 0
    try:
        for size in _sizes(folder) if folder else ():
            total += size
            if total > limit:
                return f"the program wrote more than {limit:,} bytes"
    except PermissionError:
        return "the program made a folder that cannot be read"
    except TooDeepError:
        return f"the program made folders more than {MAX_DEPTH} deep"
    return ""


class TooDeepError(Exception):
    """Folders stand inside of each other deeper than `MAX_DEPTH`."""


def _sizes(name: str, above: int | None = None, depth: int = 0) -> Iterator[int]:
    """Yield the sizes of all files and folders below a folder. The program may replace or remove them meanwhile, so no
    link is followed, and a folder that has become something else counts nothing.
    """
    if depth > MAX_DEPTH:
        raise TooDeepError
    try:
        inside = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return
        raise
    try:
        with os.scandir(inside) as scan:
            entries = list(scan)  # at once: the program may add files faster than they are measured
        for entry in entries:
            with suppress(OSError):
                yield max(os.stat(entry.name, dir_fd=inside, follow_symlinks=False).st_size, BLOCK)
            if entry.is_dir(follow_symlinks=False):
                yield from _sizes(entry.name, inside, depth + 1)
    finally:
        os.close(inside)


_places = threading.BoundedSemaphore(os.cpu_count() or 1)
"""Programs at once: more would only take each other's time, which is limited."""
