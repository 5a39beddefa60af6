"""Watchdog of a run: records the current phase, and writes stack traces when a phase takes too long.

`heartbeat.json` in the run folder shows an external monitor the current phase, and its start. When a phase exceeds the
limit, the stacks of all threads are written to `stacks.txt`, so that a hang can be diagnosed afterwards. The run itself
continues: a watchdog cannot tell slow from stuck.
"""

import faulthandler
import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Self

from covey.train.run_files import HEARTBEAT, STACKS

log = logging.getLogger(__name__)


class Watchdog:
    """Thread that watches the run; a context manager.

    Args:
        folder: the run folder; None disables the watchdog.
        limit: seconds that a phase may take; 0 is no limit.
        every: seconds between two checks.
    """

    def __init__(self, folder: Path | None, limit: float, every: float = 5.0):
        self.folder, self.limit, self._every = folder, limit, every
        self._phase, self._since, self._reported = "start", time.time(), False
        self._failure: str | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def phase(self, name: str) -> None:
        """Begin the phase `name`."""
        self._phase, self._since, self._reported = name, time.time(), False

    def __enter__(self) -> Self:
        if self.folder is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        assert self.folder is not None
        ended = False
        while not ended:  # at once, so that even the shortest run writes it
            phase, since = self._phase, self._since
            self._write_heartbeat(self.folder / HEARTBEAT, phase, since)
            if self.limit and time.time() - since > self.limit and not self._reported:
                self._reported = True
                self._write_stacks(self.folder / STACKS, phase, since)
            ended = self._ended.wait(min(self._every, self.limit or self._every))

    def _write_heartbeat(self, file: Path, phase: str, since: float) -> None:
        """Write the heartbeat atomically. A failure is reported once, until its reason changes."""
        beat = {"phase": phase, "since": round(since, 1), "now": round(time.time(), 1), "process": os.getpid()}
        draft = file.with_name(f".{file.name}")
        try:
            draft.write_text(json.dumps(beat) + "\n", encoding="utf-8")
            draft.replace(file)
            self._failure = None
        except OSError as error:
            if error.strerror != self._failure:
                log.warning(f"{file.name} cannot be written: {error.strerror}")
            self._failure = error.strerror

    def _write_stacks(self, file: Path, phase: str, since: float) -> None:
        head = f"{time.strftime('%Y-%m-%d %H:%M:%S')}  phase {phase!r} for {time.time() - since:.0f} s\n"
        try:
            with file.open("a", encoding="utf-8") as out:
                out.write(head)
                out.flush()
                faulthandler.dump_traceback(out, all_threads=True)
                out.write("\n")
        except OSError as error:
            log.warning(f"{file.name} cannot be written: {error.strerror}")
        log.warning(f"{phase} has taken {time.time() - since:.0f} s; what every thread was doing: {file}")
