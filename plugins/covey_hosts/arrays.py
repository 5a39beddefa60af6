"""Arrays and meshes over the devices of several processes."""

from functools import cache
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding

from covey.errors import RecipeError
from covey.parallel.mesh import PROCESS, check_whole_copies, local_mesh, spans_processes
from covey_hosts.channel import Channel

Tree = TypeVar("Tree")


def put(channel: Channel, tree: Any, targets: Any) -> Any:
    """Put arrays on the shardings in the same tree. Both may have devices of several processes."""
    return jax.tree.map(_put_over_processes, tree, targets)


def _put_over_processes(x: jax.Array, to: Sharding) -> jax.Array:
    """Put `x` on `to`. Both may have devices of several processes."""
    if x.is_fully_addressable == to.is_fully_addressable:
        put: jax.Array = jax.device_put(x, to)
        return put
    if not x.is_fully_addressable:
        return _gather_locally(x, to)
    host = np.asarray(x)
    return jax.make_array_from_callback(x.shape, to, lambda index: host[index])


def put_host(channel: Channel, tree: Tree, to: Sharding) -> Tree:
    """Put arrays that each process has as a whole on `to`. Each process puts the parts of its own devices."""
    if to.is_fully_addressable:
        put: Tree = jax.device_put(tree, to)
        return put
    # Not device_put: it sends the arrays to all other processes, to compare them.
    divided: Tree = jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, to, lambda index: x[index]), tree)
    return divided


def to_host(channel: Channel, x: jax.Array) -> np.ndarray:
    """Return the whole of `x`. Where other processes hold parts of it, all processes call this."""
    is_whole = x.is_fully_addressable or x.is_fully_replicated
    return np.asarray(x if is_whole else multihost_utils.process_allgather(x, tiled=True))


def read_own_rows(channel: Channel, x: jax.Array, rows: Sharding, out: np.ndarray) -> None:
    """Write the rows of `x` that this process's devices hold into `out`, if `x` has the sharding `rows`; otherwise all
    rows, for which all processes call this.
    """
    if x.is_fully_addressable or not x.sharding.is_equivalent_to(rows, x.ndim):
        out[:] = to_host(channel, x)
        return
    for shard in x.addressable_shards:
        out[shard.index] = shard.data


def _gather_locally(x: jax.Array, to: Sharding) -> jax.Array:
    """Gather `x`, on a mesh over processes, in each process on its part of that mesh; then put it on `to`."""
    assert isinstance(x.sharding, NamedSharding)
    assert isinstance(x.sharding.mesh, Mesh)
    local = local_mesh(x.sharding.mesh)
    spec = to.spec if isinstance(to, NamedSharding) and to.mesh == local else x.sharding.spec
    gathered = jax.device_put(x, NamedSharding(with_process_axis(x.sharding.mesh), spec))
    pieces = [piece.data for piece in gathered.addressable_shards]
    whole = jax.make_array_from_single_device_arrays(x.shape, NamedSharding(local, spec), pieces)
    put: jax.Array = jax.device_put(whole, to)
    return put


@cache
def with_process_axis(mesh: Mesh) -> Mesh:
    """Return `mesh` with the axis `PROCESS` before its own: the parts of all processes.

    Raises:
        RecipeError: a process has no part, or they differ in shape.
    """
    parts = [local_mesh(mesh, process).devices for process in range(jax.process_count())]
    if len({part.shape for part in parts}) > 1:
        shapes = ", ".join(str(part.shape) for part in parts)
        raise RecipeError(f"the processes have parts of {shapes} in a mesh", want="parts of one shape", where="mesh")
    return Mesh(np.stack(parts), (PROCESS, *mesh.axis_names), axis_types=(AxisType.Auto,) * (1 + mesh.devices.ndim))


def check_even_mesh(channel: Channel, mesh: Mesh) -> None:
    """Refuse the mesh of a model of which the processes do not have equal parts.

    Raises:
        RecipeError: see above.
    """
    with_process_axis(mesh)


def check_per_process_mesh(channel: Channel, mesh: Mesh, actor: Mesh | None, role: str) -> None:
    """Refuse the mesh of a role that each process plays for itself, on its own part of the mesh.

    Raises:
        RecipeError: the mesh has devices of another process and none of this one, divides a copy of the weights over
            processes, or has some of the actor's devices and others.
    """
    if not spans_processes(mesh):
        if mesh.devices.flat[0].process_index != jax.process_index():
            raise RecipeError(
                f"the mesh of the {role} has devices of another process",
                want="devices of this process, or equally many of each: each process samples and scores its share",
                fix=f"leave the {role} out: it is then on each process's part of the actor's mesh",
                where="role_to_mesh",
            )
        return
    with_process_axis(mesh)
    check_whole_copies(mesh, role)
    shared = set(mesh.devices.flat) & (set() if actor is None else set(actor.devices.flat))
    if shared and len(shared) != mesh.devices.size:
        raise RecipeError(
            f"the mesh of the {role} has {len(shared)} of the actor's devices beside others",
            want="in several processes, devices of its own or those of the actor",
            where="role_to_mesh",
        )
