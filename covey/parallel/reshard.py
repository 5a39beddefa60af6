"""Transfers of trees of arrays between devices, and the names and the mesh of a tree's leaves.

A path is dotted: `layers.0.attn.q_proj.kernel`. Checkpoints, sharding rules and errors all use these names, which do
not depend on the classes that hold the arrays.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import PyTree, UInt8

from covey.errors import CoveyError
from covey.parallel import processes
from covey.parallel.mesh import PROCESS

Tree = TypeVar("Tree")


def reshard(tree: PyTree, target_shardings: PyTree, donate: bool = False, *, copy: bool = False) -> PyTree:
    """Move `tree` to `target_shardings`; the call returns at once, and the arrays arrive later.

    Under Pathways its own resharder moves the arrays, and the call returns after they have arrived. Where arrays or
    targets span several processes, all of them call this, in one order: arrays that each process holds as a whole are
    divided, and arrays of a mesh over processes may be gathered on own devices of each process.

    Args:
        tree: arrays, in any nesting.
        target_shardings: one sharding for all arrays; or a tree with the same names, of shardings or of arrays that
            have them.
        donate: donate the source: its memory is freed as the arrays leave its devices, and it cannot be used again.
        copy: copy also arrays that are already on a target device. Otherwise the result shares those buffers with
            `tree`, and an update that donates one of the two deletes the data of the other.

    Raises:
        CoveyError: the trees do not have the same leaves.
    """
    target = _shardings(tree, target_shardings)
    if copy:
        tree = jax.tree.map(lambda x, to: x if _leaves_devices(x, to) else jnp.copy(x), tree, target)
    return _choose_resharder()(tree, target, donate=donate)


def flatten(tree: PyTree) -> dict[str, Any]:
    """Return every leaf by its dotted path, in the order of `jax.tree.leaves`; an `nnx.State` is read as a dict.

    >>> flatten({"layers": [{"bias": 1}, {"bias": 2}]})
    {'layers.0.bias': 1, 'layers.1.bias': 2}

    Raises:
        CoveyError: two leaves have the same name, because a key contains a dot.
    """
    flat: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = dotted_path(path)
        if name in flat:
            raise CoveyError(f"two leaves of a tree are called {name!r}", want="keys without dots")
        flat[name] = leaf
    return flat


def dotted_path(path: tuple[Any, ...]) -> str:
    """Convert a key path of JAX to text; the `.value` that `nnx.Variable` puts at its end is left out."""
    if path and path[-1] == jax.tree_util.GetAttrKey("value"):
        path = path[:-1]
    return jax.tree_util.keystr(path, simple=True, separator=".")


def mesh_of(tree: PyTree) -> Mesh | None:
    """Return the mesh that the tree's arrays are on; None if they are on no mesh.

    Raises:
        CoveyError: the arrays are on more than one mesh.
    """
    meshes: dict[Any, str] = {}
    for name, leaf in flatten(tree).items():
        sharding = leaf if isinstance(leaf, Sharding) else getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            meshes.setdefault(sharding.mesh, name)
    if len(meshes) > 1:
        places = "; ".join(f"{name} on {_describe(mesh)}" for mesh, name in meshes.items())
        raise CoveyError(
            f"one tree on {len(meshes)} meshes: {places}", want="all arrays on one mesh", fix="reshard it first"
        )
    return next(iter(meshes), None)


def _describe(mesh: Mesh) -> str:
    axes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    return f"({axes}; devices {[device.id for device in mesh.devices.flat]})"


def _shardings(tree: PyTree, target: PyTree) -> PyTree:
    """Return the shardings of `target`, matched by name, in the structure of `tree`."""
    paths = flatten(tree).keys()
    targets = dict.fromkeys(paths, target) if isinstance(target, Sharding) else flatten(target)
    if odd := sorted(paths ^ targets.keys()):
        raise CoveyError(
            f"only one of the two trees has {', '.join(odd[:5])}", want="a target for each array, and no other"
        )
    ordered = [targets[path] for path in paths]
    shardings = [leaf if isinstance(leaf, Sharding) else leaf.sharding for leaf in ordered]
    return jax.tree.unflatten(jax.tree.structure(tree), shardings)


def _leaves_devices(x: jax.Array, to: Sharding) -> bool:
    """Return whether `x` leaves all of its devices, and so cannot share a buffer with the result."""
    return x.sharding.device_set.isdisjoint(to.device_set)


def _device_put(tree: PyTree, target: PyTree, *, donate: bool) -> PyTree:
    # Not device_put(donate=True): in jax 0.10.2 it returns arrays that crash the process when used, if devices differ,
    # and frees nothing if they do not. Nor does may_alias=False always copy: one of several replicas is still shared.
    moved = processes.here().put(tree, target)
    for leaf, to in zip(jax.tree.leaves(tree), jax.tree.leaves(target), strict=True):
        if donate and _leaves_devices(leaf, to):
            leaf.delete()
    return moved


def stack_bytes(data: bytes) -> UInt8[jax.Array, "processes longest"]:
    """Return the bytes of each process as a row on its first device, with zeros behind shorter ones. All call this."""
    row = np.zeros((1, max(processes.here().all_gather(len(data), "number of bytes"))), np.uint8)
    row[0, : len(data)] = np.frombuffer(data, np.uint8)
    firsts = [next(d for d in jax.devices() if d.process_index == n) for n in range(jax.process_count())]
    rows = NamedSharding(Mesh(firsts, (PROCESS,)), PartitionSpec(PROCESS))
    return jax.make_array_from_callback((len(firsts), row.shape[1]), rows, lambda index: row)


def _choose_resharder() -> Callable[..., PyTree]:
    """Return Pathways' resharder if it is installed and in use, else `_device_put`."""
    if find_spec("pathwaysutils") is None or not import_module("pathwaysutils").is_pathways_backend_used():
        return _device_put
    resharder: Callable[..., PyTree] = import_module("pathwaysutils.experimental.reshard").reshard
    return resharder
