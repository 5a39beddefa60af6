"""One order of the programs over several processes, launched from one thread.

Every process must launch the same programs over several processes in the same order. If two processes do not, or if
two threads of a process launch programs, the collectives take each other's data: results are wrong without an error, or
all wait for ever. So before a phase that launches such programs, the processes exchange a digest of program, step and
phase (`channel`). If a digest differs from that of process 0, all processes are refused before they launch anything.
So no process waits for a late one inside of a collective, where it cannot learn that the other is lost, and where the
first exchange of a group of CPU devices gives up after 30 seconds.

    with processes.here().phase("update", step):
        ...  # launches programs over all processes

A launch outside of any phase is not seen.
"""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from covey.errors import CoveyError
from covey_hosts.channel import Channel


class OrderError(CoveyError):
    """A process wants to launch another program than the others, or to launch programs from a second thread."""


@contextmanager
def phase(channel: Channel, name: str, step: int, program: Any = "") -> Iterator[None]:
    """Launch programs over several processes in the body of the `with` statement. If a device program fails because a
    process is gone, that process is named. All processes must call it, from the thread that has opened the channel.

    Args:
        channel: the channel.
        name: name of the phase.
        step: number of the step.
        program: a value, such as shapes, whose `repr` must be equal; or a function that returns it.

    Raises:
        OrderError: one process is at another phase than process 0, or this is another thread.
        PeerLostError: another process is stopped, gone, or has failed.
    """
    _compare(channel, f"{name!r} of step {step}", program)
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        if isinstance(error, CoveyError) or (verdict := channel.find_lost_peer()) is None:
            raise
        raise verdict.error() from error


def in_order(channel: Channel, name: str, function: Any) -> Any:
    """Return the jitted `function` in a form that all processes launch together when the shapes of its arguments are
    new and span processes. A process that has compiled it sooner waits here, and not inside of a collective.
    """
    return _Launched(channel, name, function)


class _Launched:
    def __init__(self, channel: Channel, name: str, function: Any):
        self._channel, self._name, self._function, self._shapes = channel, name, function, set[Any]()

    def __call__(self, *args: Any) -> Any:
        arrays = [x for x in jax.tree.leaves(args) if isinstance(x, jax.Array)]
        shapes = tuple((x.shape, x.dtype) for x in arrays)
        if shapes not in self._shapes and not all(x.is_fully_addressable for x in arrays):
            self._function.lower(*args).compile()  # the call finds it
            _compare(self._channel, f"{self._name} in new shapes", shapes)
            self._shapes.add(shapes)
        return self._function(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)


def _compare(channel: Channel, what: str, program: Any) -> None:
    """Compare a launch with those of the other processes, before it; errors as for `phase`."""
    thread = threading.current_thread()
    if thread is not channel.thread:
        raise OrderError(
            f"process {channel.index}: the thread {thread.name!r} wants to launch {what}, and "
            f"{channel.thread.name!r} launches the programs over several processes",
            want="one thread that launches them: between two threads their order differs from process to process",
            fix="let other threads do host work only",
        )
    channel.doing = what
    compared = repr((what, program() if callable(program) else program))
    digest = hashlib.blake2b(compared.encode(), digest_size=12).hexdigest()
    launches = channel.compare((digest, what), "a launch")
    if not launches:
        return
    number = 0 if launches[0] != (digest, what) else max(launches)
    wanted = launches[number][1]
    differs = f"with other shapes or another program than process {number}"
    raise OrderError(
        f"process {channel.index} wants to launch {what}, "
        + (f"process {number} {wanted}" if wanted != what else differs),
        want="the same programs in the same order in every process",
        fix="look for what depends on the process: its time, its random numbers, its share of the data",
    )
