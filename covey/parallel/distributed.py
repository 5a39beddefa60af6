"""Several processes train one model on one mesh: each runs the same program, on its own devices of that mesh.

Models, optimizer states and batches are arrays over all processes, and JAX does what has to be exchanged between them.
Only the rollout belongs to each process alone: it samples and scores its share of a step's prompts on its own devices.
Then all processes exchange the groups, and do the rest of the step on the same ones. With one process every function
here returns its input.

Programs over several processes are launched from one thread, in one order; otherwise they hang, or compute wrong values
without an error. `gathered` exchanges values between hosts. It begins with an exchange of the processes' status
(`_meet`), so that no process waits for one that has failed.

`join` starts JAX's multi-process runtime from environment variables:

JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID    set by hand: host:port of process 0, count, own index
COVEY_DISTRIBUTED=auto                                        read from the cluster: Slurm, MPI, Kubernetes, a TPU pod
COVEY_DISTRIBUTED=off                                         one process, whatever else is set

Process 0 listens only at the address given to the others, unless JAX_COORDINATOR_BIND_ADDRESS names another. The
runtime has no authentication, so anyone who can reach that port can disturb the run.
"""

import base64
import os
import re
import signal
import socket
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.experimental.compilation_cache import compilation_cache

from covey.config.processes import ADDRESS, BIND, COUNT, MODE, NUMBER
from covey.errors import CoveyError, RecipeError, Stopped, nearest
from covey.parallel import checks, liveness, order, store, wire

T = TypeVar("T")
REPORTED = 2000
"""Largest length of an error text sent to the other processes, in bytes."""
HEARTBEAT = 60
"""Seconds without a heartbeat after which a process is taken to be dead."""
LEAVING = 30
"""Seconds that a process waits at its end for the others to end; then JAX aborts it."""


class PeerError(liveness.PeerLostError):
    """Another process has failed or ended, so this one cannot go on.

    Attributes:
        stopped: what has stopped the other process, if a signal has; its `step` is for the caller to set.
    """

    stopped: Stopped | None = None


@contextmanager
def start(environment: Mapping[str, str] | None = None) -> Iterator[None]:
    """Join the processes that the environment names (`join`), if any, for the body of the `with` statement.

    Call it before any other use of JAX. If the program has already called `jax.distributed.initialize`, nothing is
    joined. An error in the body ends all processes: the others get a `PeerError` at their next exchange, or are ended
    by their watch (`liveness`), as they are when a process is stopped or gone.

    Args:
        environment: environment variables; the system's if not set.

    Raises:
        CoveyError: the environment is contradictory, or the processes do not come together, or run different code.
    """
    environment = os.environ if environment is None else environment
    silent = liveness.silent_seconds(environment)
    if not jax.distributed.is_initialized():
        join(environment)
    if count() == 1:
        yield
        return
    if jax.default_backend() == "cpu":
        read_no_programs()
    try:
        with liveness.watching(silent):
            checks.check_same_code()
            yield
            _meet("the end")
    except liveness.PeerLostError:
        raise
    except BaseException as error:
        with suppress(PeerError):
            _meet("failure", _told(error).encode()[:REPORTED], failed=_status(error))
        raise


def read_no_programs() -> None:
    """Let this process compile its programs instead of reading them from JAX's cache, from now on.

    For CPUs, where process 0 alone finds programs in the cache, because their keys hold the process. Four processes of
    which one had read the gradients' program and three had compiled it waited for each other until gloo gave up.
    """
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX asks only once whether there is a cache


def count() -> int:
    """Return the number of processes."""
    return int(jax.process_count())


def index() -> int:
    """Return the index of this process, from 0."""
    return jax.process_index()


def is_first() -> bool:
    """Return whether this is the process that writes files and shows progress."""
    return index() == 0


def share(items: Sequence[T]) -> tuple[int, Sequence[T]]:
    """Return the index of this process's first item, and its contiguous part of `items`."""
    start, stop = (len(items) * number // count() for number in (index(), index() + 1))
    return start, items[start:stop]


def gathered(value: T, about: str) -> list[T]:
    """Return the `value` of every process, by process index. All must call it with the same `about`.

    Raises:
        PeerError: a process has failed, has ended, or is at another point of the program.
    """
    if count() == 1:
        return [value]
    mine = wire.pack(value)
    with _uninterrupted():
        everyone = _meet(about, mine)
    return [wire.unpack(data) for data in everyone]


def all_of(items: Sequence[T], about: str) -> list[T]:
    """Return the `items` of all processes, by process index."""
    return [item for theirs in gathered(list(items), about) for item in theirs]


def all_of_from_a_thread(items: Sequence[T], about: str) -> list[T]:
    """Return the `items` of all processes, by process index, without a device program: also from a thread that is not
    the one that launches the programs over several processes, while those run.

    Raises:
        PeerLostError: another process is stopped, gone, or has failed.
    """
    if count() == 1:
        return list(items)
    mine = base64.b64encode(wire.pack(list(items))).decode()
    everyone = store.exchange(mine, about, liveness.refuse_to_wait)
    return [item for theirs in everyone for item in wire.unpack(base64.b64decode(theirs))]


def agreed(value: T, about: str) -> T:
    """Return the `value` of process 0 to all processes."""
    return gathered(value, about)[0]


def refuse_differences(about: str, value: Callable[[], Any], fix: str) -> None:
    """Refuse processes whose `value` differs from that of process 0; with one process it is not computed.

    Raises:
        RecipeError: the values differ.
    """
    if count() == 1:
        return
    found = gathered(value(), about)
    other = [number for number, theirs in enumerate(found) if theirs != found[0]]
    if other:
        raise RecipeError(f"process {other[0]} has another {about} than process 0", want="the same in all", fix=fix)


def fingerprint(tree: Any) -> int:
    """Return a checksum of the bits of all arrays of `tree`; differences that cancel out in the sum go unnoticed."""
    return int(_bits(tree))


@jax.jit
def _bits(tree: Any) -> jax.Array:
    """Sum the arrays' bits as integers modulo 2³²: the order, and so the sharding, does not matter."""
    total: jax.Array = jnp.uint32(0)
    for x in jax.tree.leaves(tree):
        x = x.astype(jnp.uint8) if x.dtype == bool else x
        total += jnp.sum(jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}"), dtype=jnp.uint32)
    return total


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay signals that Python handles until the end of an exchange.

    If one ended the exchange halfway, the others would take the report of the failure for the rest of its data.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handled = {number: handler for number, handler in handlers.items() if callable(handler)}
    held: list[Any] = []
    for number in handled:
        signal.signal(number, lambda *at: held.append(at))
    try:
        yield
    finally:
        for number, handler in handled.items():
            signal.signal(number, handler)
    for number, frame in held:
        handled[number](number, frame)


def _meet(about: str, data: bytes = b"", failed: int = 0) -> list[bytes]:
    """Return the `data` of every process, after all have exchanged their point of the program and their `_status`."""
    where = zlib.crc32(about.encode()) & 0x7FFFFFFF
    calls = _allgather(np.array([where, len(data), failed], np.int32))
    sizes = calls[:, 1]
    # A power of two, so that a run has few shapes, since each is compiled.
    padded = np.zeros(1 << int(sizes.max() - 1).bit_length() if sizes.max() else 0, np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    rows = _allgather(padded) if padded.size else np.zeros((count(), 0), np.uint8)
    texts = [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]
    for number in np.flatnonzero(calls[:, 2]) if not failed else ():
        error = PeerError(f"process {number} has failed: {texts[number].decode(errors='replace')}")
        if (status := int(calls[number, 2])) < 0:
            error.stopped = Stopped(signal.Signals(-status).name)
        raise error
    if len(set(calls[:, 0])) > 1 and not failed:
        raise PeerError(
            f"the processes have come apart: this one is at {about!r}, another is not",
            want="the same program, settings and data in all of them",
        )
    return texts


def _allgather(array: np.ndarray) -> np.ndarray:
    order.refuse_second_thread("an exchange")
    found: np.ndarray = _exchange(lambda: multihost_utils.process_allgather(array))
    return found


def _exchange(transfer: Callable[[], T]) -> T:
    try:
        return transfer()
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        what = liveness.blame() or f"another process is gone: {lines[0]}"
        raise PeerError(what, fix="its own output says why; what it was killed by, the system's log") from error


def _status(error: BaseException) -> int:
    """Return 1; for an error that stands for a signal, its negative number."""
    if isinstance(error, KeyboardInterrupt):
        return -signal.Signals[error.signal if isinstance(error, Stopped) else "SIGINT"]
    return 1


def _told(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return f"it was stopped by {str(error) or 'Ctrl-C'}"
    return str(error) if isinstance(error, CoveyError) else f"{type(error).__name__}: {error}"


def join(environment: Mapping[str, str]) -> None:
    """Join the processes that `environment` names; do nothing if it names none, or only this one.

    Call it before any other use of JAX.

    Raises:
        CoveyError: the environment is contradictory, or the processes do not come together.
    """
    mode, named = environment.get(MODE, ""), _named(environment)
    if mode not in ("", "auto", "off"):
        raise CoveyError(f"{MODE} is {mode!r}", fix=nearest(mode, ("auto", "off")), where="environment")
    if mode == "off" or (mode == "" and not named):
        return
    address, processes, number = named if named and mode != "auto" else (None, None, None)
    if processes == 1:
        return
    listens = _listens_at(address, environment) if address and number == 0 else None
    print(f"waiting for {processes or 'all'} processes at {address or 'the place the cluster names'}", file=sys.stderr)
    jax.config.update("jax_enable_preemption_service", False)  # it would catch SIGTERM and keep the process running
    # On CPUs, a program on one device of a process and a later one on several would run at once and mix their messages.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    try:
        jax.distributed.initialize(
            address,
            processes,
            number,
            heartbeat_timeout_seconds=HEARTBEAT,
            shutdown_timeout_seconds=LEAVING,
            coordinator_bind_address=listens,
        )
    except (RuntimeError, ValueError) as error:
        raise CoveyError(
            f"the processes did not come together: {str(error).strip() or type(error).__name__}",
            want=f"{ADDRESS}, {COUNT} and {NUMBER} for each process, or a cluster that JAX knows",
            fix="docs/scaling.md",
        ) from error
    if jax.process_index():
        print(f"process {jax.process_index()} of {jax.process_count()}; process 0 shows the progress", file=sys.stderr)


def _listens_at(address: str, environment: Mapping[str, str]) -> str:
    """Return the host:port that process 0 listens at.

    Raises:
        CoveyError: the address cannot be bound; JAX would end the process with a segmentation fault.
    """
    place = environment.get(BIND) or address
    host, _, port = place.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        with socket.socket(*found[0][:3]) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(found[0][4])
    except OSError as error:
        raise CoveyError(
            f"process 0 cannot listen at {place}: {error.strerror or error}",
            want="an address of this machine and a free port",
            fix=f"where the others reach it under another address, {BIND}=[::]:port listens on every interface",
            where="environment",
        ) from error
    return place


def _named(environment: Mapping[str, str]) -> tuple[str, int, int] | None:
    """Return the address, the number of processes and this one's index; None if the environment has none of them."""
    given = {name: environment[name] for name in (ADDRESS, COUNT, NUMBER) if environment.get(name)}
    if not given or environment.get(MODE):
        return None
    if missing := [name for name in (ADDRESS, COUNT, NUMBER) if name not in given]:
        what = f"{' and '.join(given)} set, and {' and '.join(missing)} not"
        raise CoveyError(what, want="all three, or none", fix=f"{MODE}=auto lets JAX ask the cluster for them")
    for name, (form, want) in FORMS.items():
        if not re.fullmatch(form, given[name]):
            raise CoveyError(f"{name} is {given[name]!r}", want=want, where="environment")
    processes, number = int(given[COUNT]), int(given[NUMBER])
    if number >= processes:
        what = f"{NUMBER} is {number}, and {COUNT} is {processes}"
        raise CoveyError(what, want=f"a number from 0 to {processes - 1}", where="environment")
    return given[ADDRESS], processes, number


FORMS = {
    ADDRESS: (r".+:\d{1,5}", "host:port of process 0"),
    COUNT: ("[0-9]+", "a whole number"),
    NUMBER: ("[0-9]+", "a whole number"),
}
"""Pattern of the value of each variable, and its description in errors."""
