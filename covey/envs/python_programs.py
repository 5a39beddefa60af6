"""Programs of a model, each executed in a child process of its own with limits (`python_child`)."""

import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

CHILD = Path(__file__).with_name("python_child.py")
PROTECTIONS = ("limits", "landlock", "seccomp")
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Limits:
    """Limits of a program.

    Attributes:
        seconds: time until it is ended, from its start.
        cpu_seconds: computing time.
        memory: bytes of address space.
        file: bytes of one file.
        folder: bytes of all its files, about: they are counted 20 times a second.
        output: bytes that it may print.
    """

    seconds: float = 10.0
    cpu_seconds: int = 5
    memory: int = 1 << 29
    file: int = 1 << 20
    folder: int = 1 << 25
    output: int = 1 << 16


@dataclass(frozen=True)
class Outcome:
    """Outcome of a program.

    Attributes:
        output: what it printed, standard output and errors together.
        failure: why it failed; empty if it did not.
        protections: names of the protections that held.
    """

    output: str
    failure: str
    protections: tuple[str, ...]


def run_program(program: str, limits: Limits = Limits(), *, only_limits: bool = False) -> Outcome:
    """Execute a program in a child process.

    Args:
        program: source of the program.
        limits: limits of the child.
        only_limits: execute it also where the kernel has no Landlock or no seccomp: it can then read and write the
            files of this user and use the network.
    """
    with _places, tempfile.TemporaryDirectory(prefix="covey-python-") as folder, tempfile.TemporaryFile() as source:
        source.write(program.encode(errors="replace"))
        source.seek(0)
        reading, writing = os.pipe()
        try:
            child = _start(folder, source, writing, limits, only_limits)
        finally:
            os.close(writing)
        with os.fdopen(reading, "rb") as told, child:
            output, failure = _follow(child, folder, limits)
            with suppress(ProcessLookupError):  # whatever it has left behind, while its number is still its own
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            os.set_blocking(told.fileno(), False)
            protections = tuple(filter(None, (told.read(100) or b"").decode().split(",")))
    if missing := [name for name in PROTECTIONS if name not in protections and not only_limits]:
        failure = f"this system has no {' and no '.join(missing)}"
    return Outcome(output.decode(errors="replace"), failure or _ending(child.returncode, limits), protections)


def _start(folder: str, source: IO[bytes], tell: int, limits: Limits, only_limits: bool) -> "subprocess.Popen[bytes]":
    numbers = [tell, limits.cpu_seconds, limits.memory, limits.file]
    # Not -I, which would ignore PYTHONHASHSEED: sets would print in another order each time.
    command = [sys.executable, "-P", "-s", "-S", str(CHILD), folder, *map(str, numbers)]
    return subprocess.Popen(
        [*command, *(["limits"] if only_limits else [])],
        stdin=source,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"},
        pass_fds=(tell,),
        start_new_session=True,
    )


def _follow(child: "subprocess.Popen[bytes]", folder: str, limits: Limits) -> tuple[bytes, str]:
    """Return what a child prints until it ends or exceeds a limit, and which limit that was."""
    assert child.stdout is not None
    output, end, is_open = b"", time.monotonic() + limits.seconds, True
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while is_open or not _has_ended(child.pid):
            if selector.select(POLL_SECONDS) and is_open:
                piece = os.read(child.stdout.fileno(), limits.output)
                output, is_open = output + piece, bool(piece)
                if not is_open:
                    selector.unregister(child.stdout)
            if len(output) > limits.output:
                return output[: limits.output], f"the program printed more than {limits.output:,} bytes"
            if time.monotonic() > end:
                return output, f"the program took longer than {limits.seconds:g} s"
            if _size(folder) > limits.folder:
                return output, f"the program wrote more than {limits.folder:,} bytes"
    return output, ""


def _has_ended(process: int) -> bool:
    """Return whether a child has ended, without reaping it: its number stays its own."""
    return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _size(folder: str) -> int:
    """Return the size of the files and folders below a folder in bytes, each at least a block."""
    total = 0
    for path, folders, names in os.walk(folder):
        for name in (*folders, *names):
            with suppress(OSError):
                total += max(os.lstat(os.path.join(path, name)).st_size, 4096)
    return total


def _ending(code: int, limits: Limits) -> str:
    """Return what an exit code says; nothing for 0."""
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"the program took more than {limits.cpu_seconds} s of computing time"
    return "" if code == 0 else f"the program ended with exit code {code}"


_places = threading.BoundedSemaphore(os.cpu_count() or 1)
"""Programs at once: more would only take each other's time, which is limited."""
