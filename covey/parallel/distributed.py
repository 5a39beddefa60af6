"""Several processes train one model together: each samples, scores and learns from its own share of a step's prompts.

Every process runs the same program on its own devices, with a whole copy of the weights there (over its devices they
are sharded like any others). Once an update the processes add up their gradients; all then apply the same sum, so the
copies stay equal bit for bit. Nothing else has to agree: micro-batches, their number and their shapes are each
process's own business. With one process every function here hands back what it was given.

Arrays on devices are added up by `summed`; anything else goes from host to host by `gathered`. Both begin with a roll
call, in which a process can say that it has failed: so nobody waits for one that will not come.
"""

import os
import signal
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from operator import attrgetter
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from covey.errors import CoveyError, RecipeError
from covey.parallel import wire
from covey.parallel.joining import ADDRESS, join
from covey.parallel.reshard import mesh_of

T = TypeVar("T")
R = TypeVar("R")

PROCESS = "process"
"""Name of the mesh axis over the processes."""
REPORTED = 2000
"""Characters of an error that the other processes hear."""


class PeerError(CoveyError):
    """Another process failed or is gone, so this one cannot go on."""


@contextmanager
def start(environment: Mapping[str, str] | None = None) -> Iterator[None]:
    """Joins the processes that the environment names (`joining`), when it names any, for what is done inside.

    Comes before any other use of JAX. A program that called `jax.distributed.initialize` by itself is taken as it is.
    Inside, an error in one process ends all of them: the others get a `PeerError` when they next exchange something.

    Args:
        environment: the system's when not set.

    Raises:
        CoveyError: the environment is contradictory, or the processes do not come together.
    """
    if not jax.distributed.is_initialized():
        join(os.environ if environment is None else environment)
    if count() == 1:
        yield
        return
    try:
        yield
        _meet("the end")
    except PeerError:
        raise
    except BaseException as error:
        with suppress(PeerError):
            _meet("failure", _told(error).encode()[:REPORTED], failed=True)
        raise


def count() -> int:
    """How many processes there are."""
    return int(jax.process_count())


def index() -> int:
    """The number of this process, from 0."""
    return jax.process_index()


def is_first() -> bool:
    """Whether this is the process that writes files and shows progress."""
    return index() == 0


def share(items: Sequence[T]) -> tuple[int, Sequence[T]]:
    """This process's share of `items`, one run of neighbours, and the number of its first one."""
    start, stop = (len(items) * number // count() for number in (index(), index() + 1))
    return start, items[start:stop]


def gathered(value: T, about: str) -> list[T]:
    """The `value` of every process, in their order. All have to call it, each with the same `about`.

    Raises:
        PeerError: a process has failed, is gone, or is somewhere else in the program.
    """
    if count() == 1:
        return [value]
    mine = wire.pack(value)
    with _uninterrupted():
        everyone = _meet(about, mine)
    return [wire.unpack(data) for data in everyone]


def all_of(items: Sequence[T], about: str) -> list[T]:
    """The `items` of all processes, in their order."""
    return [item for theirs in gathered(list(items), about) for item in theirs]


def agreed(value: T, about: str) -> T:
    """The `value` of the first process, for all."""
    return gathered(value, about)[0]


def jointly(compute: Callable[[list[T]], Sequence[R]], mine: Sequence[T], about: str) -> list[R]:
    """What `compute` makes of the items of all processes, in their order; of that, the part that belongs to `mine`."""
    numbered = all_of([(index(), item) for item in mine], about)
    results = compute([item for _, item in numbered])
    return [result for (owner, _), result in zip(numbered, results, strict=True) if owner == index()]


def refuse_differences(about: str, value: Callable[[], Any], fix: str) -> None:
    """Refuses to go on when processes do not have the same `value`, which is asked for only if there are several.

    Raises:
        RecipeError: they differ.
    """
    if count() == 1:
        return
    found = gathered(value(), about)
    other = [number for number, theirs in enumerate(found) if theirs != found[0]]
    if other:
        raise RecipeError(f"process {other[0]} has another {about} than process 0", want="the same in all", fix=fix)


def refuse_several(what: str) -> None:
    """Refuses `what` where there are several processes, with a RecipeError."""
    if count() > 1:
        fix = f"start it once, without {ADDRESS}; the devices of one process can be a mesh"
        raise RecipeError(f"{what} on {count()} processes", want="one process", fix=fix)


def refuse_uneven(prompts: int) -> None:
    """Refuses a step of so many prompts that the processes would not get the same number each.

    Raises:
        RecipeError: `prompts` is no multiple of the processes.
    """
    n = count()
    if prompts % n:
        raise RecipeError(
            f"training.prompts_per_step is {prompts}, over {n} processes {prompts} / {n} = {prompts / n:.4g} each",
            want="the same number of prompts for each process",
            fix=" or ".join(str(m * n) for m in (prompts // n, prompts // n + 1) if m),
            where="training.prompts_per_step",
        )


def refuse_foreign(mesh: Mesh | None, role: str) -> None:
    """Refuses a mesh with devices of other processes: weights are sharded within a process, and repeated over them.

    Raises:
        RecipeError: a device of `mesh` is not this process's.
    """
    if mesh is not None and any(device.process_index != index() for device in mesh.devices.flat):
        raise RecipeError(
            f"the mesh of the {role} has devices of other processes",
            want="a mesh of jax.local_devices(): each process holds a whole copy of the weights",
            fix="more devices a process, where the model needs more memory",
            where="role_to_mesh",
        )


def summed(tree: T, about: str) -> T:
    """A tree of arrays with the same shapes in every process, added up over them; errors as in `gathered`.

    The arrays lie on this process's devices, before and after, and every process gets the same bits. The source is
    given up.
    """
    if count() == 1:
        return tree
    mesh = _over_processes(tree)
    blocks = jax.tree.map(lambda x: _as_block(x, mesh), tree)
    places = jax.tree.map(lambda x: NamedSharding(mesh, PartitionSpec(*_spec(x))), tree)
    jax.tree.map(lambda x: x.delete(), tree)
    with _uninterrupted():
        _meet(about)
        totals = _exchange(lambda: jax.block_until_ready(jax.jit(_sums, out_shardings=places)(blocks)))
    own: T = jax.tree.map(_own, tree, totals)
    return own


def fingerprint(tree: Any) -> int:
    """A number that differs when any bit of an array of `tree` does, but for bits that make up for each other."""
    return int(_bits(tree))


@jax.jit
def _bits(tree: Any) -> jax.Array:
    """The arrays' bits as whole numbers, added up modulo 2³²: in any order the same, so sharding does not matter."""
    total: jax.Array = jnp.uint32(0)
    for x in jax.tree.leaves(tree):
        x = x.astype(jnp.uint8) if x.dtype == bool else x
        total += jnp.sum(jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}"), dtype=jnp.uint32)
    return total


def _sums(tree: T) -> T:
    # A function of the module: jit knows it again at the next update, and does not compile anew.
    totals: T = jax.tree.map(lambda x: x.sum(0), tree)
    return totals


def _as_block(x: jax.Array, mesh: Mesh) -> jax.Array:
    """[processes, ...] over all processes, of which `x` is this one's block."""
    pieces = [piece.data[None] for piece in x.addressable_shards]
    where = NamedSharding(mesh, PartitionSpec(PROCESS, *_spec(x)))
    return jax.make_array_from_single_device_arrays((count(), *x.shape), where, pieces)


def _own(x: jax.Array, total: jax.Array) -> jax.Array:
    """This process's copy of `total`, which lies where `x` lay."""
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, [p.data for p in total.addressable_shards])


def _spec(x: jax.Array) -> Sequence[Any]:
    return tuple(x.sharding.spec) if isinstance(x.sharding, NamedSharding) else ()


def _over_processes(tree: Any) -> Mesh:
    """The mesh on which the arrays of `tree` lie, with the same devices of the other processes behind it."""
    local = mesh_of(tree)
    if local is None:
        (device,) = jax.tree.leaves(tree)[0].devices()
        mine, names = np.array(device), ()
    else:
        mine, names = local.devices, local.axis_names
    ordered = sorted(jax.devices(), key=attrgetter("id"))
    of_process = [[device for device in ordered if device.process_index == p] for p in range(count())]
    places = [of_process[index()].index(device) for device in mine.flat]
    devices = np.array([[of[place] for place in places] for of in of_process]).reshape(count(), *mine.shape)
    return Mesh(devices, (PROCESS, *names))


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """A signal that Python handles waits for the end of an exchange: halfway through, the others would take the
    farewell for its rest.
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


def _meet(about: str, data: bytes = b"", failed: bool = False) -> list[bytes]:
    """The roll call: the `data` of every process, after all have said where they are and that they are well."""
    where = zlib.crc32(about.encode()) & 0x7FFFFFFF
    calls = _allgather(np.array([where, len(data), failed], np.int32))
    sizes = calls[:, 1]
    # A power of two, so that a run has few shapes: each is compiled.
    padded = np.zeros(1 << int(sizes.max() - 1).bit_length() if sizes.max() else 0, np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    rows = _allgather(padded) if padded.size else np.zeros((count(), 0), np.uint8)
    texts = [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]
    for number in np.flatnonzero(calls[:, 2]) if not failed else ():
        raise PeerError(f"process {number} has failed: {texts[number].decode(errors='replace')}")
    if len(set(calls[:, 0])) > 1 and not failed:
        raise PeerError(
            f"the processes have come apart: this one is at {about!r}, another is not",
            want="the same program, settings and data in all of them",
        )
    return texts


def _allgather(array: np.ndarray) -> np.ndarray:
    found: np.ndarray = _exchange(lambda: multihost_utils.process_allgather(array))
    return found


def _exchange(transfer: Callable[[], T]) -> T:
    try:
        return transfer()
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        what = f"another process is gone: {lines[0]}"
        raise PeerError(what, fix="its own output says why; what it was killed by, the system's log") from error


def _told(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return f"it was stopped by {str(error) or 'Ctrl-C'}"
    return str(error) if isinstance(error, CoveyError) else f"{type(error).__name__}: {error}"
