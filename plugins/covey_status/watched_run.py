"""A run as the files of its folder tell another process.

In: `heartbeat.json`, the lock of the checkpoints, `metrics.jsonl` and `samples.jsonl` of a run that may be writing
them, on this machine or on another one that shares the folder. Out: a `Status`, a state, and the rows that were added
since the last look. The files are untrusted: what has another form is left out. This module imports neither JAX nor
NumPy.
"""

import fcntl
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from covey.files import MAX_LINE, folder_below, is_count, number, open_below, parse_line
from covey.monitor.run_files import CHECKPOINTS, METRICS, SAMPLES, SUMMARY
from covey.monitor.status import Status
from covey.train.storage import LOCK
from covey_status.run_files import HEARTBEAT

RUNNING, FINISHED, STOPPED, FAILED, DEAD = "running", "finished", "stopped", "failed", "dead"
SILENCE = 30.0
"""Seconds without a new heartbeat after which a run on another machine, whose lock cannot be seen, counts as dead."""
TAIL = 4_000_000
"""Maximum number of bytes at the end of the samples that are read when a file is opened."""


@dataclass(frozen=True)
class Heartbeat(Status):
    """Status of a run as its `heartbeat.json` tells it.

    Attributes:
        now: time at which it was written, in seconds since 1970.
        host: name of the machine.
        ended: how the run has ended; empty while it goes on.
        reason: signal or error that ended it.
    """

    now: float = 0.0
    host: str = ""
    ended: str = ""
    reason: str = ""


def read_heartbeat(folder: Path) -> Heartbeat | None:
    """Read the heartbeat of the run in `folder`; None if there is none, or none that can be read."""
    if (entries := read_object(folder / HEARTBEAT)) is None:
        return None
    values: dict[str, Any] = {}
    for field in fields(Heartbeat):
        entry = entries.get(field.name)
        if field.type is str and isinstance(entry, str):
            values[field.name] = entry
        elif field.type is not str and (value := number(entry)) is not None and value >= 0:
            values[field.name] = int(value) if field.type is int else value
    values["phase_seconds"] = max(values.get("now", 0.0) - (number(entries.get("since")) or 0.0), 0.0)
    if values.get("ended") not in (FINISHED, STOPPED, FAILED):
        values["ended"] = ""
    return Heartbeat(**values)


class WatchedRun:
    """A run as its files show it. `look` reads what is new.

    Args:
        folder: the run folder.

    Attributes:
        heartbeat: the last one; None before the first.
        state: running, finished, stopped by a signal, failed with an error, or dead: its process is gone without
            having said so.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.heartbeat: Heartbeat | None = None
        self.state = RUNNING
        self._metrics, self._samples = NewLines(folder / METRICS), NewLines(folder / SAMPLES, TAIL)
        self._step, self._fresh_until = -1, 0.0

    def look(self) -> list[dict[str, float]]:
        """Read the lines that were written since the last call; return the rows of metrics among it, by ascending step.

        The state is read first, so that all rows are there when the run is seen to have ended.
        """
        self.read_state()
        rows = []
        for line in self._metrics.read():
            row = parse_line(line) or {}
            if is_count(step := row.get("step")) and step > self._step:
                self._step = step
                values = {name: value for name, raw in row.items() if (value := number(raw)) is not None}
                rows.append(values | {"step": step})
        return rows

    def new_samples(self) -> Iterator[Mapping[str, Any]]:
        """Yield the rows of `samples.jsonl` that were written since the last call; at first the last ones."""
        yield from filter(None, map(parse_line, self._samples.read()))

    def summary(self) -> Mapping[str, Any]:
        """Return the content of `summary.json`; empty while there is none."""
        return read_object(self.folder / SUMMARY) or {}

    def read_state(self) -> None:
        """Read the heartbeat and the lock, and no rows."""
        beat = read_heartbeat(self.folder)
        if beat is not None and (self.heartbeat is None or beat.now != self.heartbeat.now):
            age = max(time.time() - beat.now, 0.0) if self.heartbeat is None else 0.0
            self._fresh_until = time.monotonic() + SILENCE - age
        self.heartbeat = beat or self.heartbeat
        self.state = self._current_state()

    def _current_state(self) -> str:
        beat = self.heartbeat
        if is_locked(folder_below(self.folder, CHECKPOINTS)):
            return RUNNING
        if beat is not None and beat.ended:
            return beat.ended
        if beat is not None and beat.host != socket.gethostname() and time.monotonic() < self._fresh_until:
            return RUNNING
        return FINISHED if isinstance(self.summary().get("after"), dict) else DEAD


def is_locked(folder: Path) -> bool:
    """Return whether a process holds the lock of `folder`, as far as this machine can see."""
    try:
        with open_below(folder, LOCK) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # closing the file gives it back
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def read_state(folder: Path) -> str:
    """Return the state of the run in `folder` at this moment; see `WatchedRun.state`."""
    run = WatchedRun(folder)
    run.read_state()
    return run.state


class NewLines:
    """Complete lines of a file that grows. When a resumed run has cut the file, it is read from its beginning again.

    Args:
        file: the file; it need not exist yet.
        tail: number of bytes at the end that the first read is limited to; 0 is no limit.
    """

    def __init__(self, file: Path, tail: int = 0):
        self._file, self._tail, self._at, self._opened = file, tail, 0, False

    def read(self) -> Iterator[bytes]:
        """Yield the lines that were completed since the last call, and lines longer than `MAX_LINE` in pieces."""
        try:
            file = open_below(self._file.parent, self._file.name)
        except OSError:
            return
        with file:
            size = file.seek(0, 2)
            if not self._opened and self._tail:
                self._at = max(size - self._tail, 0)
            self._opened, self._at = True, self._at if self._at <= size else 0
            file.seek(self._at)
            while (line := file.readline(MAX_LINE)) and (line.endswith(b"\n") or len(line) == MAX_LINE):
                self._at += len(line)
                yield line


def read_object(file: Path) -> dict[str, Any] | None:
    """Read a file that holds one JSON object; None if there is none, or none that can be read."""
    try:
        with open_below(file.parent, file.name) as content:
            return parse_line(content.read(MAX_LINE))
    except OSError:
        return None
