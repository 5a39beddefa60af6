"""One order of the programs over several processes, launched from one thread.

Every process must launch the same programs over several processes in the same order. Where two of them do not, or where
two threads of one process launch some, the collectives take each other's data: results are wrong without an error, or
all wait for ever. So before a phase that launches such programs, each process writes a digest of program, step and
phase into the shared store (`parallel.store`) and compares it with that of process 0, which compares it with that of
each other process. If one differs, all are refused before they launch anything; else process 0 lets all of them start.
So none waits for a late one inside of a collective, where it could not be told that the other is lost, and where the
first exchange of a group of CPU devices gives up after 30 seconds.

    with order.phase("update", step):
        ...  # launches programs over all processes

With one process a phase does nothing. A launch outside of any phase is not seen.
"""

import hashlib
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from covey.errors import CoveyError
from covey.parallel import liveness
from covey.parallel.liveness import PeerLostError, Watch
from covey.parallel.store import POLL_SECONDS, CoordinationStore, Store

log = logging.getLogger(__name__)

REPORT_SECONDS = 60.0
"""Seconds that a process waits for another one before it says so."""
START, REFUSED = "start", "refused"
"""Key of what process 0 has found, and its value unless all may start."""


class OrderError(CoveyError):
    """A process wants to launch another program than the others, or wants to launch one from a second thread."""


class LaunchOrder:
    """Order of the phases of one process, compared with that of the others.

    Args:
        store: what the processes share.
        index: index of this process.
        count: number of processes.
        watch: names a process that is lost while this one waits for it.
        name: name of the order in the store.
    """

    def __init__(self, store: Store, index: int, count: int, watch: Watch | None = None, name: str = "order"):
        self._store, self._index, self._count, self._watch, self._name = store, index, count, watch, name
        self._number, self._thread = 0, threading.current_thread()

    def enter(self, name: str, step: int | None, program: object = "") -> None:
        """Compare the phase `name` of `step` with that of the others, before it launches anything; return once all are
        there.

        Args:
            name: name of the phase.
            step: number of the step; None if the name says enough.
            program: what else must be equal, such as shapes, or a function that returns it; its `repr` is compared.

        Raises:
            OrderError: one process is at another phase than process 0, or this is another thread than the first one's.
            PeerLostError: another process is stopped, gone, or has failed.
        """
        what = name if step is None else f"{name!r} of step {step}"
        self.refuse_second_thread(what)
        if self._watch is not None:
            self._watch.doing = what
        compared = repr((name, step, program() if callable(program) else program))
        digest = hashlib.blake2b(compared.encode(), digest_size=12).hexdigest()
        self._store.set(f"{self._folder()}/{self._index}", f"{digest} {what}")
        if self._index == 0:
            self._let_all_start(digest, what)
        else:
            self._compare(0, digest, what)
            self._refuse_unless_all_start(what)
        self._number += 1

    def _let_all_start(self, digest: str, what: str) -> None:
        try:
            for number in range(1, self._count):
                self._compare(number, digest, what)
        except OrderError:
            self._store.set(f"{self._folder()}/{START}", REFUSED)
            raise
        self._store.set(f"{self._folder()}/{START}", START)
        if self._number:  # all have read what was written for the phase before
            self._store.delete(self._folder(self._number - 1))

    def _refuse_unless_all_start(self, what: str) -> None:
        if self._wait_for(START, what) == REFUSED:
            raise OrderError(
                f"process {self._index} wants to launch {what}, as process 0 does, and one of the others does not",
                want="the same programs in the same order in every process",
                fix="the output of process 0 names it",
            )

    def _folder(self, number: int | None = None) -> str:
        return f"covey/{self._name}/{self._number if number is None else number}"

    def refuse_second_thread(self, what: str) -> None:
        """Refuse to launch `what` from another thread than the first one's; errors as for `enter`."""
        thread = threading.current_thread()
        if thread is not self._thread:
            raise OrderError(
                f"process {self._index}: the thread {thread.name!r} wants to launch {what}, and "
                f"{self._thread.name!r} launches the programs over several processes",
                want="one thread that launches them: between two threads their order differs from process to process",
                fix="let other threads do host work only",
            )

    def _compare(self, number: int, digest: str, what: str) -> None:
        theirs, _, wanted = self._wait_for(str(number), what).partition(" ")
        if theirs == digest:
            return
        differs = f"with other shapes or another program than process {number}"
        raise OrderError(
            f"process {self._index} wants to launch {what}, "
            + (f"process {number} {wanted}" if wanted != what else differs),
            want="the same programs in the same order in every process",
            fix="look for what depends on the process: its time, its random numbers, its share of the data",
        )

    def _wait_for(self, key: str, what: str) -> str:
        started, reported = time.monotonic(), False
        while (found := self._store.wait(f"{self._folder()}/{key}", POLL_SECONDS)) is None:
            if self._watch is not None and self._watch.verdict:
                raise PeerLostError(self._watch.verdict, fix="its own output, or the system's log, says why")
            if not reported and time.monotonic() - started > REPORT_SECONDS:
                late = "the other processes" if key == START else f"process {key}"
                log.warning(f"waiting for {late} before {what} since {REPORT_SECONDS:.0f} s")
                reported = True
        return found


_order: LaunchOrder | None = None


@contextmanager
def phase(name: str, step: int, program: Any = "") -> Iterator[None]:
    """Launch programs over several processes in the body of the `with` statement; arguments and errors as for
    `LaunchOrder.enter`. If a device program fails because a process is gone, that process is named.

    All processes must call it, from the thread that called it first.
    """
    if jax.process_count() == 1:
        yield
        return
    _order_of_this_process().enter(name, step, program)
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        if isinstance(error, CoveyError) or not (lost := liveness.blame()):
            raise
        raise PeerLostError(lost, fix="its own output, or the system's log, says why") from error


def launched_together(name: str, function: Any) -> Any:
    """Return the jitted `function` so that all processes launch it at the same moment when its first call for some
    shapes has arrays of several processes: one that has compiled it sooner waits for the others here, and not inside of
    a collective. With one process it is `function` itself.
    """
    return function if jax.process_count() == 1 else _LaunchedTogether(name, function)


class _LaunchedTogether:
    def __init__(self, name: str, function: Any):
        self._name, self._function, self._launched = name, function, set[Any]()

    def __call__(self, *args: Any) -> Any:
        leaves = jax.tree.leaves(args)
        shapes = tuple((x.shape, x.dtype) for x in leaves if isinstance(x, jax.Array))
        if shapes not in self._launched and any(_is_shared(x) for x in leaves):
            self._function.lower(*args).compile()  # the call finds it
            _order_of_this_process().enter(f"{self._name} in new shapes", None, shapes)
            self._launched.add(shapes)
        return self._function(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)


def _is_shared(x: Any) -> bool:
    return isinstance(x, jax.Array) and not x.is_fully_addressable


def refuse_second_thread(what: str) -> None:
    """Refuse to launch `what` over several processes from another thread than the one that has launched such programs
    first; errors as for `LaunchOrder.enter`. With one process nothing is refused.
    """
    if jax.process_count() > 1:
        _order_of_this_process().refuse_second_thread(what)


def _order_of_this_process() -> LaunchOrder:
    global _order
    if _order is None:
        _order = LaunchOrder(CoordinationStore(), jax.process_index(), jax.process_count(), liveness.current())
    return _order
