"""Watchdog of a run: records what the run does, and writes stack traces when a phase takes too long.

`heartbeat.json` in the run folder shows an external monitor, and `covey watch`, the current phase, its start and the
`Status` of the run; at the end of the run it says how the run has ended. When a phase exceeds the limit, the stacks of
all threads are written to `stacks.txt`, so that a hang can be diagnosed afterwards. The run itself continues: a
watchdog cannot tell slow from stuck.
"""

import faulthandler
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from covey.config.recipe import Recipe, SFTRecipe
from covey.display import mask_secrets
from covey.errors import ResumeError, Stopped
from covey.files import open_below, replace_file
from covey.monitor.progress import Progress
from covey.monitor.status import Status
from covey.run.folder import RunFolder
from covey.run.outputs import Watcher
from covey_status.run_files import HEARTBEAT, STACKS

log = logging.getLogger(f"covey.{__name__}")  # as part of Covey, whose log a run shows


def watch(recipe: Recipe | SFTRecipe, folder: RunFolder, progress: Progress) -> "Watchdog":
    """Return the watchdog of a run in a folder."""
    return Watchdog(folder.path if folder.writes else None, recipe.training.watchdog_seconds, status=progress.status)


class Watchdog(Watcher):
    """Thread that watches the run; a context manager.

    Args:
        folder: the run folder; None disables the watchdog.
        limit: seconds that a phase may take; 0 is no limit.
        every: seconds between two checks.
        status: returns the status to write.
    """

    def __init__(
        self, folder: Path | None, limit: float, every: float = 1.0, status: Callable[[], Status] = lambda: Status()
    ):
        self.folder, self.limit, self._every, self._status = folder, limit, every, status
        self._end: dict[str, str] = {}
        self._phase, self._since, self._reported = "start", time.time(), False
        self._failure: str | None = None
        self._ended = threading.Event()
        self._owner = threading.current_thread()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def phase(self, name: str) -> None:
        """Begin the phase `name`. One of another thread, which samples ahead, is none of the run: the run waits for it
        in a phase of its own.
        """
        if threading.current_thread() is not self._owner:
            return
        self._phase, self._since, self._reported = name, time.time(), False

    def __enter__(self) -> Self:
        if self.folder is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._end = _how_it_ended(error)
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        assert self.folder is not None
        ended = False
        while True:  # at once, so that even the shortest run writes it
            phase, since = self._phase, self._since
            self._write_heartbeat(self.folder / HEARTBEAT, phase, since)
            if self.limit and time.time() - since > self.limit and not self._reported:
                self._reported = True
                self._write_stacks(self.folder / STACKS, phase, since)
            if ended:
                return
            ended = self._ended.wait(min(self._every, self.limit or self._every))

    def _write_heartbeat(self, file: Path, phase: str, since: float) -> None:
        """Write the heartbeat atomically. A failure is reported once, until its reason changes."""
        beat: dict[str, Any] = asdict(self._status())
        beat |= {"phase": phase, "since": round(since, 1), "now": round(time.time(), 1)}
        beat |= {"process": os.getpid(), "host": socket.gethostname()} | self._end
        try:
            replace_file(file, json.dumps(beat).encode() + b"\n", durable=False)
            self._failure = None
        except OSError as error:
            if error.strerror != self._failure:
                log.warning(f"{file.name} cannot be written: {error.strerror}")
            self._failure = error.strerror

    def _write_stacks(self, file: Path, phase: str, since: float) -> None:
        head = f"{time.strftime('%Y-%m-%d %H:%M:%S')}  phase {phase!r} for {time.time() - since:.0f} s\n"
        try:
            with open_below(file.parent, file.name, "ab") as out:
                out.write(head.encode())
                out.flush()
                faulthandler.dump_traceback(out, all_threads=True)
                out.write(b"\n")
        except (OSError, ResumeError) as error:
            log.warning(f"{file.name} cannot be written: {getattr(error, 'strerror', error)}")
        log.warning(f"{phase} has taken {time.time() - since:.0f} s; what every thread was doing: {file}")


def _how_it_ended(error: BaseException | None) -> dict[str, str]:
    """Return the entries of the last heartbeat of a run that ended with `error`, or without one."""
    if error is None:
        return {"ended": "finished"}
    stopped = error if isinstance(error, Stopped) else getattr(error, "stopped", None)
    if isinstance(stopped, Stopped):
        return {"ended": "stopped", "reason": stopped.signal}
    reason = str(getattr(error, "what", "")) or f"{type(error).__name__}: {error}"
    return {"ended": "failed", "reason": mask_secrets(reason.partition("\n")[0])}
