"""Start a training command as several processes on this machine, and stop all of them when one fails.

Process 0 writes to the terminal, the others to a file each. When a process fails, the others have some seconds to
notice and say so; then they are ended, since they would wait for it in an exchange. The first that failed is named,
with the end of its output. A signal to the launcher is passed on to all, so that the run saves a checkpoint as it does
in one process. If the launcher itself is killed, each process sees the end of a pipe that it had open, and stops in the
same way (`stop_with_launcher`). A training command goes on from its last checkpoint after a failure.
"""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

from covey.config import recipe
from covey.config.base import Config, NonNegativeInt, PositiveInt
from covey.config.overrides import split
from covey.config.processes import ADDRESS, BIND, COUNT, LAUNCHER, MODE, NUMBER, PEER_LOST
from covey.display import printable
from covey.errors import CoveyError
from covey.files import open_below

TRAINING = ("train", "sft")
"""Commands that a restart resumes."""
VERBS = (*TRAINING, "eval", "export")
"""Commands that use several processes."""
RESUME = "--resume"
"""Option that names the run to go on with."""


@dataclass(frozen=True)
class TrainingCommand:
    """A command of several processes: its words after `covey`; the folder that it writes, or the run that it evaluates,
    if its words name one; and the number of devices of its recipe's mesh, 0 without a mesh.
    """

    words: tuple[str, ...]
    run: str | None
    devices: int = 0

    @property
    def resumes(self) -> bool:
        """Whether the words go on with a run. They may change its settings, so another attempt repeats them."""
        return RESUME in dict(split(self.words[1:], 1)[1])

    @property
    def resume_words(self) -> tuple[str, ...]:
        """Words that go on with the run.

        Raises:
            CoveyError: the words name no run folder.
        """
        if self.run is None or self.words[0] not in TRAINING:
            raise CoveyError(
                "restarts need to know the run folder", want="a command with --out FOLDER or --resume FOLDER"
            )
        return (self.words[0], RESUME, self.run)

    def next_words(self) -> tuple[str, ...]:
        """Return the words for another attempt: they go on with the run if it has begun, else they begin it."""
        begun = self.words[0] in TRAINING and self.run is not None and recipe.is_run(Path(self.run))
        return self.resume_words if begun and not self.resumes else self.words


def training_command(words: Sequence[str]) -> TrainingCommand:
    """Return the command of several processes that `words` are, after checking its recipe and settings.

    Raises:
        CoveyError: they are another command, or the command itself would be refused.
    """
    if not words or words[0] not in VERBS:
        command = f"covey {words[0]}" if words else "nothing"
        raise CoveyError(f"{command} cannot be launched as several processes", want="covey launch … train NAME_OR_YAML")
    names, pairs = split(words[1:], 1)
    flags, verb = dict(pairs), words[0]
    if verb == "export":
        return TrainingCommand(tuple(words), _export_folder(words, names, pairs))
    flag, usage = (RESUME, "NAME_OR_YAML") if verb in TRAINING else ("--recipe", "RUN_OR_MODEL [--recipe NAME]")
    if not names and (verb == "eval" or flag not in flags):
        raise CoveyError(
            "no model is given to evaluate" if verb == "eval" else "no recipe is given to launch",
            want=f"covey launch … {verb} {usage}",
        )
    changes = [f"{name}={value}" for name, value in pairs if name != flag]
    settings = recipe.load_any(flags.get(flag) or names[0], changes)
    if verb == "eval":
        run: str | None = names[0] if recipe.is_run(names[0]) else "eval"
    else:
        run = flags.get(RESUME) or settings.out
    mesh = settings.model.mesh
    devices = mesh.data * mesh.fsdp * mesh.tp
    return TrainingCommand(tuple(words), _without_slash(run), devices if devices > 1 else 0)


def _without_slash(folder: str | None) -> str | None:
    """Return the folder without slashes at its end: the folder of logs has its name, with -logs at the end."""
    return None if folder is None else str(Path(folder).expanduser())


def _export_folder(words: Sequence[str], names: Sequence[str], pairs: Sequence[tuple[str, str]]) -> str | None:
    flags = {flag.removeprefix("--"): value for flag, value in pairs}
    if not names or "out" not in flags:
        raise CoveyError(
            "no model is given to export" if not names else "no folder is given to export to",
            want="covey launch … export RUN_OR_MODEL --out FOLDER",
        )
    if flags.get("format") == "gguf":
        raise CoveyError(
            "a GGUF file is written by one process",
            want="--format hf or peft for several; llama.cpp converts the first to GGUF",
            fix=f"{shlex.join(['covey', *words])}, where one process can hold the model",
        )
    return _without_slash(flags["out"])


COVEY = (sys.executable, "-m", "covey")
NOTICE_SECONDS = 8.0
"""Seconds that processes have to end by themselves after another one has failed."""
STOP_SECONDS = 12.0
"""Seconds that they then have to end after SIGTERM, before they are killed."""
POLL_SECONDS = 0.1
LAST_LINES = 20
"""Number of lines of a failed process's output that are shown."""
STOPPED_CODES = (75, 130, 143)
"""Exit codes of a run that was stopped by a signal: it has not failed and is not restarted."""
BEGAN = "--- "
"""Beginning of the line in front of a process's output."""
INTRUDER = re.compile(r"unexpectedly tried to connect with a different incarnation|request from a newer incarnation")
"""Text of JAX's coordination service when a second process joins under a number that is taken. It then aborts all
processes; or, before all have joined, the earlier one. It does not tell beforehand whether a number is taken.
"""


class LocalOptions(Config):
    """Settings of `covey launch local`."""

    processes: PositiveInt = 2
    """Number of processes."""
    max_restarts: NonNegativeInt = 0
    """Number of times that the run is resumed from its last checkpoint after a failure."""
    min_processes: PositiveInt | None = None
    """Fewest processes that a restart may have: each leaves out the process that failed, with its GPUs. When not set, a
    restart has as many as before.
    """
    gpus_per_process: PositiveInt | None = None
    """Give each process so many GPUs of its own (CUDA_VISIBLE_DEVICES); all see all GPUs when not set."""
    logs: str | None = None
    """Folder for the output of processes 1 and up; the run folder's name with -logs behind it when not set."""

    def fewer(self, count: int, devices: int) -> int | None:
        """Return the largest number of processes below `count` that a restart may have; None if it may have none.

        Args:
            count: number of processes that there are.
            devices: number of devices of the run's mesh, which all processes have equally many of; 0 if it sets none.
        """
        each = devices if self.gpus_per_process is None else self.gpus_per_process
        numbers = range(count - 1, (self.min_processes or count) - 1, -1)
        return next((number for number in numbers if devices % number == 0 and devices <= number * each), None)


@dataclass(frozen=True)
class Failure:
    """The first process that failed: its number, its exit code, which is negative for a signal, and whether it still
    runs, given up by the others.
    """

    number: int
    code: int
    hangs: bool = False

    def __str__(self) -> str:
        if self.hangs:
            return f"process {self.number} was stopped, or hung"
        killed = f"was killed by {signal.Signals(-self.code).name}" if self.code < 0 else f"ended with code {self.code}"
        return f"process {self.number} {killed}"


def launch(command: TrainingCommand, options: LocalOptions, program: Sequence[str] = COVEY) -> int:
    """Run `command` in several processes until it ends, is stopped by a signal, or has failed too often.

    Args:
        command: the command.
        options: number of processes, restarts, GPUs, folder of the logs.
        program: program and first arguments, to which the words of the command are added.

    Returns the exit code of the first process that failed, or 128 + the signal that killed it; 0 if none failed.

    Raises:
        CoveyError: no restart could have fewer processes, and `options` ask for some.
    """
    _check_minimum(options, command.devices)
    members: Sequence[int] = range(options.processes)
    logs = Path(options.logs or f"{command.run}-logs")
    logs.mkdir(parents=True, exist_ok=True)
    for attempt in count():
        with Attempt((*program, *command.next_words()), options, logs, attempt, members) as processes:
            failure = processes.wait()
        if failure is None or failure.code in STOPPED_CODES:
            return 0 if failure is None else failure.code
        _say(f"{failure}; the others were stopped")
        if failure.code != -signal.SIGABRT or not _name_intruder(logs, len(members), attempt):
            _show_end(logs, failure.number, attempt)
        if attempt == options.max_restarts:
            return failure.code if failure.code > 0 else 128 - failure.code
        if (fewer := options.fewer(len(members), command.devices)) is not None:
            members = [member for n, member in enumerate(members) if n != failure.number][:fewer]
        _say(f"restart {attempt + 1} of {options.max_restarts}, {len(members)} processes")
    raise AssertionError("unreachable")


def _check_minimum(options: LocalOptions, devices: int) -> None:
    if options.min_processes is None or options.fewer(options.processes, devices) is not None:
        return
    of_mesh = f", for a mesh of {devices} devices" if devices else ""
    raise CoveyError(
        f"no restart of {options.processes} processes can have fewer, and {options.min_processes} at least{of_mesh}",
        want="a smaller --min-processes" + (", and a number that divides the mesh" if devices else ""),
        fix="a recipe without model.mesh has a copy of the weights in each process, and goes on with any number"
        if devices
        else "",
    )


class Attempt:
    """The processes of one attempt. Leaving the context ends the processes that still run.

    Args:
        words: command line of each process.
        options: number of processes and their GPUs.
        logs: folder for the output of processes 1 and up.
        number: number of this attempt, from 0.
        members: the processes of the first attempt that are in this one.
    """

    def __init__(
        self, words: Sequence[str], options: LocalOptions, logs: Path, number: int, members: Sequence[int] | None = None
    ):
        self._words, self._options, self._logs, self._number = words, options, logs, number
        self._members = range(options.processes) if members is None else members
        self._processes: list[subprocess.Popen[bytes]] = []
        self._stack = ExitStack()

    def __enter__(self) -> "Attempt":
        try:
            self._pass_signals_on()
            self._alive = self._open_pipe()
            port = free_port()
            for number in range(len(self._members)):
                self._processes.append(self._start(number, port))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End the processes that still run. They have time to notice a failure by themselves, before SIGTERM and before
        SIGKILL.
        """
        self._wait(NOTICE_SECONDS)
        for process in self._processes:
            process.terminate()
            process.send_signal(signal.SIGCONT)  # a halted process cannot end
        self._wait(STOP_SECONDS)
        for process in self._processes:
            process.kill()
            process.wait()
        self._stack.close()

    def wait(self) -> Failure | None:
        """Wait until all processes have ended or one has failed; return the failure."""
        while True:
            codes = [process.poll() for process in self._processes]
            failures = [Failure(number, code) for number, code in enumerate(codes) if code]
            if None not in codes or any(failure.code not in STOPPED_CODES for failure in failures):
                return self._first_cause(failures)
            time.sleep(POLL_SECONDS)

    def _first_cause(self, failures: Sequence[Failure]) -> Failure | None:
        """Return the process that caused the failures of the others: one that still runs if all have given it up."""
        if failures and all(failure.code == PEER_LOST for failure in failures):
            self._wait(NOTICE_SECONDS)
            self._wait(NOTICE_SECONDS, left=1)  # one in a device program may take longer than the rest to end
            codes = [process.poll() for process in self._processes]
            failures = [Failure(n, PEER_LOST if code is None else code) for n, code in enumerate(codes) if code != 0]
            running = [n for n, code in enumerate(codes) if code is None]
            if running and all(failure.code == PEER_LOST for failure in failures):
                self._processes[running[0]].kill()  # it is halted, or hangs: asking takes time and leads to nothing
                return Failure(running[0], PEER_LOST, hangs=True)
        return cause(failures) if failures else None

    def _start(self, number: int, port: int) -> "subprocess.Popen[bytes]":
        environment = process_environment(os.environ, number, self._options, port, self._members)
        environment[LAUNCHER] = str(self._alive)
        # A session of its own: Ctrl-C reaches the launcher alone, which passes it on.
        arguments: dict[str, Any] = {"env": environment, "start_new_session": True, "pass_fds": (self._alive,)}
        if number:
            file = self._stack.enter_context(open_below(self._logs, _log(number, self._number), "ab"))
            file.write(f"{_began(self._words)}\n".encode(errors="replace"))
            file.flush()
            arguments |= {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
        return subprocess.Popen(self._words, **arguments)

    def _open_pipe(self) -> int:
        """Open the pipe by which the processes notice the end of the launcher; return the end that they inherit."""
        read, write = os.pipe()
        for end in (read, write):
            self._stack.callback(os.close, end)
        return read

    def _pass_signals_on(self) -> None:
        """Pass SIGINT and SIGTERM on to all processes until the context is left."""

        def send(number: int, frame: FrameType | None) -> None:
            for process in self._processes:
                if process.poll() is None:
                    process.send_signal(number)

        for number in (signal.SIGINT, signal.SIGTERM):
            self._stack.callback(signal.signal, number, signal.signal(number, send))

    def _wait(self, seconds: float, left: int = 0) -> None:
        """Wait until at most `left` processes still run, for `seconds` at most."""
        until = time.monotonic() + seconds
        while sum(process.poll() is None for process in self._processes) > left and time.monotonic() < until:
            time.sleep(POLL_SECONDS)


def stop_with_launcher(environment: MutableMapping[str, str]) -> None:
    """Start a thread that sends SIGTERM to this process when its launcher is gone: nobody else would stop it. Without a
    launcher in `environment`, do nothing.
    """
    if not (text := environment.pop(LAUNCHER, "")):
        return
    pipe = int(text)
    os.set_inheritable(pipe, False)

    def wait() -> None:
        os.read(pipe, 1)  # nothing is written into it: this returns at its end
        with suppress(OSError):  # the terminal may be gone too
            _say("the launcher is gone: this process stops")
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="launcher", daemon=True).start()


def cause(failures: Sequence[Failure]) -> Failure:
    """Return the failure that caused the others: first a process killed by a signal, then any other, then a process
    that ended because of another, last a process that was asked to stop.
    """
    return min(failures, key=lambda f: (f.code in STOPPED_CODES, f.code == PEER_LOST, f.code > 0))


def process_environment(
    base: Mapping[str, str], number: int, options: LocalOptions, port: int, members: Sequence[int] | None = None
) -> dict[str, str]:
    """Return the environment of process `number` of `members`, which are all processes if not set: `base`, the address
    of process 0, and its GPUs if it has its own.

    Raises:
        CoveyError: there are fewer GPUs in CUDA_VISIBLE_DEVICES than the processes need.
    """
    members = range(options.processes) if members is None else members
    environment = {name: value for name, value in base.items() if name not in (MODE, BIND)}
    environment |= {ADDRESS: f"127.0.0.1:{port}", COUNT: str(len(members)), NUMBER: str(number)}
    if (gpus := options.gpus_per_process) is not None:
        total, first = options.processes * gpus, members[number] * gpus
        visible = base.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(total)))).split(",")
        if len(visible) < total:
            raise CoveyError(f"{options.processes} processes of {gpus} GPUs each", want=f"{len(visible)} GPUs at most")
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible[first : first + gpus])
    return environment


def free_port() -> int:
    """Return a port of this machine that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _log(number: int, attempt: int) -> str:
    """Return the name of the file with the output of a process."""
    return f"process-{number}.log" if attempt == 0 else f"process-{number}-restart-{attempt}.log"


def _began(words: Sequence[str]) -> str:
    """Return the line that begins a process's output: a later command of the same run appends to its logs."""
    return f"{BEGAN}{datetime.now():%Y-%m-%d %H:%M:%S}  {shlex.join(words)}"


def _say(text: str) -> None:
    print(printable(f"covey launch: {text}"), file=sys.stderr, flush=True)


def _name_intruder(logs: Path, count: int, attempt: int) -> bool:
    """Return whether JAX has aborted the processes because a stranger has joined them, and print it."""
    texts = [_output(logs, number, attempt).rpartition(f"\n{BEGAN}")[2] for number in range(1, count)]
    if not any(INTRUDER.search(text) for text in texts):
        return False
    _say(
        "an uninvited process has joined the run at the port of process 0, under a number that was taken, and JAX has "
        f"aborted the run's own: end what else was started with this {ADDRESS}, and let nobody else reach that port"
    )
    return True


def _show_end(logs: Path, number: int, attempt: int) -> None:
    """Print the last lines that process `number` wrote, unless it is process 0, which writes to the terminal."""
    if number == 0:
        return
    _say(f"the end of {logs / _log(number, attempt)}:")
    for line in _output(logs, number, attempt).splitlines()[-LAST_LINES:]:
        print(printable(f"  {line}"), file=sys.stderr, flush=True)


def _output(logs: Path, number: int, attempt: int) -> str:
    with open_below(logs, _log(number, attempt)) as file:
        return file.read().decode(errors="replace")
