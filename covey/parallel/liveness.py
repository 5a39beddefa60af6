"""Watch over the processes of a run: name the one that is stopped or gone, and end the others.

A thread of each process writes a beat into the shared store (`parallel.store`) every second and reads those of the
others. JAX's own heartbeat comes from a C++ thread and says little: a stopped process is noticed late, and nobody is
told which one it is; a process that waits for it in a device program would wait for ever.

A process whose beats stop for `SILENT_SECONDS` is taken to be stopped or gone. A process that fails says so itself
(`failed`). Either is written into the store as the verdict, so that all processes name the same one. A process that
reads a verdict has `END_SECONDS` to end by itself, for instance by the `PeerLostError` that `order.phase` raises; then
its watch ends it with the exit code `PEER_LOST`. One that ends by itself does not wait for a lost process (`leave`).
"""

import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import jax

from covey.config.processes import PEER_LOST, SILENT
from covey.display import printable
from covey.errors import CoveyError
from covey.parallel.store import CoordinationStore, Store

BEAT_SECONDS = 1.0
SILENT_SECONDS = 18.0
"""Seconds without a beat after which a process is taken to be stopped or gone; `COVEY_SILENT_SECONDS` sets others."""
LEAST_SECONDS = 5.0
BLAME_SECONDS = 6.0
"""Seconds that a process whose device program has failed waits to see whose beats have stopped."""
END_SECONDS = 5.0
"""Seconds that a process has to end by itself once it knows of a failure."""
WATCH, ENDED = "covey/watch", "ended"
LOST, FAILED = "lost", "failed"
"""Keys of the two verdicts: about a process whose beats have stopped, and by one that has failed."""


class PeerLostError(CoveyError):
    """Another process of the run is stopped, gone, or has failed, so this one cannot go on."""

    exit_code = PEER_LOST


def end_process(verdict: str) -> None:
    """Print the verdict and end this process at once: its main thread may wait in a device program for ever."""
    print(printable(f"covey: {verdict}; this process ends too"), file=sys.stderr, flush=True)
    os._exit(PEER_LOST)


@dataclass
class Beat:
    """Last beat of another process: its text, and the seconds since it was new, as far as this process was running."""

    text: str = ""
    silent: float = 0.0

    def describe(self) -> str:
        """Return what the process did last, and where it runs."""
        told: Mapping[str, str] = json.loads(self.text)
        return f"{told['doing']}; process {told['pid']} on {told['host']}"


class Watch:
    """Write this process's beats, and watch those of the others, between `start` and `stop`.

    Args:
        store: what the processes share.
        index: index of this process.
        count: number of processes.
        silent: seconds without a beat after which a process is taken to be lost.
        every: seconds between beats.
        end: called with the verdict, `END_SECONDS` after it is known; ends the process.

    Attributes:
        verdict: text that names the process that is lost or has failed; empty as long as there is none.
        lost: whether that process is lost: it will not take part in the shutdown.
        doing: phase that this process is in; the others show it when its beats stop.
    """

    def __init__(
        self,
        store: Store,
        index: int,
        count: int,
        silent: float = SILENT_SECONDS,
        every: float = BEAT_SECONDS,
        end: Callable[[str], None] = end_process,
    ):
        self._store, self._index, self._count = store, index, count
        self._silent, self._every, self._end = silent, every, end
        self.verdict, self.lost, self.doing = "", False, "start"
        self._beats = {number: Beat() for number in range(count) if number != index}
        self._rounds, self._store_silent, self._stopped, self._leaves = 0, 0.0, threading.Event(), False
        self._writes = threading.Lock()

    def start(self) -> None:
        """Start the two threads: one that talks to the store, which may hang, and one that looks at the clock."""
        for work in (self._beat, self._judge):
            threading.Thread(target=work, name=f"liveness{work.__name__}", daemon=True).start()

    def stop(self) -> None:
        """Stop watching, and tell the others that this process has ended as it should."""
        self._stopped.set()
        with self._writes, suppress(jax.errors.JaxRuntimeError):
            self._store.set(f"{WATCH}/beats/{self._index}", ENDED)

    def failed(self, reason: str) -> None:
        """Tell the others that this process has failed, unless another one is known to be lost; stop watching, so that
        the process ends with its own exit code.
        """
        if not self.verdict:
            self._stopped.set()
            self._publish(FAILED, f"process {self._index} has failed: {reason}").join(2 * self._every)

    def blame(self, seconds: float = BLAME_SECONDS) -> str:
        """Wait until a process is known to be lost; return the verdict, or "" if all still beat after `seconds`.

        For a process whose device program has failed: a closed connection says that a process is gone, not which.
        """
        if self._stopped.is_set():
            return self.verdict
        for beat in self._beats.values():
            beat.silent = 0.0
        until = time.monotonic() + seconds
        while not self.verdict and time.monotonic() < until:
            time.sleep(self._every / 4)
        longest = max(self._watched(), key=lambda number: self._beats[number].silent, default=None)
        if not self.verdict and longest is not None and self._beats[longest].silent > seconds / 2:
            self._lose(longest)
        return self.verdict

    def wait_for_the_others(self) -> None:
        """Wait until no process beats any more, or as long as they have to end by themselves. The watch then leaves the
        end of this process, which has printed the verdict, to the caller.
        """
        self._leaves = True
        until, before = time.monotonic() + END_SECONDS, [""]
        while time.monotonic() < until and (beats := [beat.text for beat in self._beats.values()]) != before:
            before = beats
            time.sleep(2.5 * self._every)

    def _watched(self) -> list[int]:
        """Return the processes that have begun to beat and have not ended."""
        return [number for number, beat in self._beats.items() if beat.text not in ("", ENDED)]

    def _beat(self) -> None:
        while not self._stopped.is_set():
            self._rounds += 1
            told = {"beat": self._rounds, "doing": self.doing, "pid": str(os.getpid()), "host": socket.gethostname()}
            try:
                with self._writes:
                    if not self._stopped.is_set():
                        self._store.set(f"{WATCH}/beats/{self._index}", json.dumps(told))
                found = self._store.under(WATCH)
            except jax.errors.JaxRuntimeError:
                return  # process 0 is gone; `_judge` notices that rounds have stopped
            self._note(found)
            self._stopped.wait(self._every)

    def _note(self, found: Mapping[str, str]) -> None:
        for number, beat in self._beats.items():
            text = found.get(f"beats/{number}", "")
            if text != beat.text:
                beat.text, beat.silent = text, 0.0
        self._store_silent = 0.0
        for kind in (LOST, FAILED):
            self._take(kind, found.get(kind, ""))

    def _take(self, kind: str, verdict: str) -> None:
        if verdict and not self.verdict:
            self.verdict, self.lost = verdict, kind == LOST

    def _judge(self) -> None:
        # Seconds are counted in steps of the loop: a process that was halted itself must not blame the others for it.
        before = time.monotonic()
        while not self.verdict and not self._stopped.wait(self._every / 2):
            now = time.monotonic()
            self._count_silence(min(now - before, self._every))
            before = now
        last = 0 if self._index else 2 * self._every  # process 0 keeps the store: JAX aborts the others without it
        if self.verdict and not self._stopped.wait(END_SECONDS + last) and not self._leaves:
            self._end(self.verdict)

    def _count_silence(self, passed: float) -> None:
        self._store_silent += passed
        if self._store_silent > self._silent and self._index:
            self._lose(0)
        if self._store_silent > 2 * self._every + passed:
            return  # without the store nothing is known of the others
        for number in self._watched():
            self._beats[number].silent += passed
            if self._beats[number].silent > self._silent:
                self._lose(number)
                return

    def _lose(self, number: int) -> None:
        beat = self._beats[number]
        last = f" (last: {beat.describe()})" if beat.text not in ("", ENDED) else ""
        seconds = max(beat.silent, self._store_silent)
        self._publish(LOST, f"process {number} of {self._count} has given no sign for {seconds:.0f} s{last}")

    def _publish(self, kind: str, verdict: str) -> threading.Thread:
        """Write the verdict, or the one that is known already, in a thread, and return that: where process 0 is
        stopped, the request never returns.
        """
        self._take(kind, verdict)
        thread = threading.Thread(target=self._write_verdict, daemon=True)
        thread.start()
        return thread

    def _write_verdict(self) -> None:
        with suppress(jax.errors.JaxRuntimeError):
            self._store.set(f"{WATCH}/{LOST if self.lost else FAILED}", self.verdict)


def silent_seconds(environment: Mapping[str, str]) -> float:
    """Return the seconds without a beat after which a process is given up, as `environment` sets them.

    Raises:
        CoveyError: the variable is no number from 5 up.
    """
    text = environment.get(SILENT) or str(SILENT_SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds >= LEAST_SECONDS:
        raise CoveyError(f"{SILENT} is {text!r}", want=f"seconds, from {LEAST_SECONDS:.0f} up", where="environment")
    return seconds


_watch: Watch | None = None


def current() -> Watch | None:
    """Return the running watch; None with one process."""
    return _watch


def blame() -> str:
    """Return the verdict on the process that a failed device program has lost (`Watch.blame`); "" if none is known."""
    return "" if _watch is None else _watch.blame()


def refuse_to_wait() -> None:
    """Refuse to wait any longer if another process is lost.

    Raises:
        PeerLostError: see above.
    """
    if _watch is not None and _watch.verdict:
        raise PeerLostError(_watch.verdict, fix="its own output, or the system's log, says why")


def leave(code: int) -> None:
    """End this process at once with `code` if another one is lost: JAX's shutdown would wait for that one. Process 0
    lets the others end first, because it keeps the store, without which JAX aborts them.
    """
    if _watch is None or not _watch.lost:
        return
    if not jax.process_index():
        _watch.wait_for_the_others()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextmanager
def watching(silent: float = SILENT_SECONDS) -> Iterator[None]:
    """Watch the processes for the body of the `with` statement; with one process do nothing.

    An error in the body is told to the others, and the watch goes on: the process may wait for them at its end. A
    signal is not: the processes agree on where they stop.
    """
    global _watch
    if jax.process_count() == 1 or _watch is not None:
        yield
        return
    _watch = Watch(CoordinationStore(), jax.process_index(), jax.process_count(), silent)
    _watch.start()
    try:
        yield
    except Exception as error:
        if not isinstance(error, PeerLostError):
            _watch.failed(str(error) if isinstance(error, CoveyError) else f"{type(error).__name__}: {error}")
        raise
    except BaseException:
        _watch.stop()
        raise
    _watch.stop()
    _watch = None
