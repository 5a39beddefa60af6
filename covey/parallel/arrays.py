"""Arrays on meshes: the names and the mesh of the arrays of a tree, transfers of trees, sharding rules, and the
placement of models, optimizer state and host arrays that follows from them.

A path is dotted: `layers.0.attn.q_proj.kernel`. Checkpoints, sharding rules and errors all use these names, which do
not depend on the classes that hold the arrays. A parameter's name determines its logical axes, and a table maps those
to mesh axes:

    layers.3.attn.q_proj.kernel  ->  ("embed", "heads")  ->  PartitionSpec("fsdp", "tp")

Only the end of the path is used, so the moments in an optimizer's state have the sharding of their parameters. Arrays
without a rule are replicated: correct on every mesh, at the price of memory. Heads are adjacent in a projection's
output, so `heads` may be split inside a head if their number is not a multiple of the mesh axis: correct too, at the
price of some communication.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jaxtyping import PyTree, UInt8

from covey.errors import CoveyError
from covey.parallel import processes
from covey.parallel.mesh import PROCESS, platform_of, spans_processes, with_auto_axes
from covey.parallel.shapes import abstract, is_abstract

Rules = Mapping[str, tuple[str, ...]]
"""Mesh axes that split each logical axis, outermost first; axes that a mesh does not have are skipped."""

DEFAULT_RULES: Rules = {
    "rows": ("data", "fsdp"),
    "time": ("tp",),
    "slots": ("data", "fsdp", "tp"),
    "vocab": ("tp",),
    "embed": ("fsdp",),
    "heads": ("tp",),
    "kv_heads": ("tp",),
    "mlp": ("tp",),
    "lora": (),
    "layer": (),
}

_MODULE_AXES = {
    "embed": ("vocab", "embed"),
    "head": ("vocab", "embed"),
    "q_proj": ("embed", "heads"),
    "k_proj": ("embed", "kv_heads"),
    "v_proj": ("embed", "kv_heads"),
    "z_proj": ("embed", "heads"),
    "a_proj": ("embed", "heads"),
    "b_proj": ("embed", "heads"),
    "o_proj": ("heads", "embed"),
    "gate_proj": ("embed", "mlp"),
    "up_proj": ("embed", "mlp"),
    "down_proj": ("mlp", "embed"),
    "input_gate": ("embed", "mlp"),
    "input_proj": ("mlp", "embed"),
    "context_proj": ("embed", "mlp"),
}
Tree = TypeVar("Tree")
Model = TypeVar("Model", bound=nnx.Module)


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


def logical_axes(path: str, shape: tuple[int, ...]) -> tuple[str | None, ...]:
    """Return the logical axis of each dimension of a parameter of the decoder; None for one that is never split.

    Args:
        path: dotted path; only its end is used.
        shape: shape of the array; with one dimension more than the parameter has, the first is `layer` (stacked).

    >>> logical_axes("layers.0.mlp.down_proj.kernel", (1536, 576))
    ('mlp', 'embed')
    >>> logical_axes("layers.0.attn.q_proj.lora.b", (64, 576))
    ('lora', 'heads')
    """
    axes = _parameter_axes(path.split("."))
    if len(shape) == len(axes) + 1:
        axes = ("layer", *axes)
    return axes if len(axes) == len(shape) else (None,) * len(shape)


def _parameter_axes(names: list[str]) -> tuple[str | None, ...]:
    *modules, leaf = names
    if modules and modules[-1] == "lora":
        modules, leaf = modules[:-1], f"lora_{leaf}"
    if modules and modules[-1] == "kernel":  # quantised: values and scales have the axes of the kernel
        modules, leaf = modules[:-1], "kernel"
    if leaf == "scale":
        return (None,)
    if not modules or modules[-1] not in _MODULE_AXES:
        return ()
    first, last = _MODULE_AXES[modules[-1]]
    by_leaf: dict[str, tuple[str | None, ...]] = {
        "embedding": (first, last),
        "kernel": (first, last),
        "bias": (last,),
        "lora_a": (first, "lora"),
        "lora_b": ("lora", last),
    }
    return by_leaf.get(leaf, ())


def shardings(
    tree: PyTree, mesh: Mesh, rules: Rules = DEFAULT_RULES, report: Callable[[str], None] | None = None
) -> PyTree:
    """Return the sharding of each array of `tree` (or of its shapes, from `jax.eval_shape`) on `mesh`, axes automatic.

    A dimension that the mesh axis does not divide, or whose mesh axis splits an earlier dimension, is replicated.

    Args:
        tree: parameters, or an optimizer's state over them.
        mesh: mesh to shard over.
        rules: mesh axes that split each logical axis.
        report: called once for each kind of dimension that was replicated; if not set, the log.

    Returns:
        A tree like `tree`, of `NamedSharding`.
    """
    replicated: dict[str, list[str]] = {}
    mesh = with_auto_axes(mesh)

    def sharding_of(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        name = dotted_path(path)
        spec, why = _partition_spec(logical_axes(name, leaf.shape), leaf.shape, mesh, rules)
        for reason in why:
            replicated.setdefault(reason, []).append(name)
        return NamedSharding(mesh, spec)

    result = jax.tree_util.tree_map_with_path(sharding_of, tree)
    for reason, names in replicated.items():
        (report or logging.getLogger(__name__).debug)(f"{reason}: kept whole in {len(names)} arrays ({names[0]}, ...)")
    return result


def mesh_axes(logical: str | None, mesh: Mesh | AbstractMesh, rules: Rules = DEFAULT_RULES) -> tuple[str, ...]:
    """Return the axes of `mesh` that split a logical axis."""
    return tuple(axis for axis in rules.get(logical or "", ()) if axis in mesh.shape)


def partition_spec(
    path: str, shape: tuple[int, ...], mesh: Mesh | AbstractMesh, rules: Rules = DEFAULT_RULES
) -> PartitionSpec:
    """Return the partition of the parameter at the dotted `path`, as `shardings` chooses it."""
    return _partition_spec(logical_axes(path, shape), shape, mesh, rules)[0]


def sharding_of(
    axes: tuple[str | None, ...], shape: tuple[int, ...], mesh: Mesh | AbstractMesh, rules: Rules = DEFAULT_RULES
) -> NamedSharding:
    """Return the sharding on `mesh` of an array with these logical axes; a dimension that cannot be split is whole."""
    return NamedSharding(mesh, _partition_spec(axes, shape, mesh, rules)[0])


def row_sharding(mesh: Mesh | AbstractMesh, rules: Rules = DEFAULT_RULES) -> NamedSharding:
    """Return the sharding of data and activations: their first dimension is `rows`, the others are not split.

    The number of rows must be a multiple of `num_row_shards`.
    """
    return NamedSharding(mesh, PartitionSpec(mesh_axes("rows", mesh, rules) or None))


def num_row_shards(mesh: Mesh | AbstractMesh | None, rules: Rules = DEFAULT_RULES) -> int:
    """Return the number of parts that rows are split into; the number of rows must be a multiple of it."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in mesh_axes("rows", mesh, rules))


def _partition_spec(
    axes: tuple[str | None, ...], shape: tuple[int, ...], mesh: Mesh | AbstractMesh, rules: Rules
) -> tuple[PartitionSpec, list[str]]:
    """Return the partition of an array, and the reasons why dimensions were not split."""
    entries: list[tuple[str, ...]] = []
    why: list[str] = []
    for logical, size in zip(axes, shape, strict=True):
        wanted = mesh_axes(logical, mesh, rules)
        parts = math.prod(mesh.shape[axis] for axis in wanted)
        if set(wanted).intersection(*[sum(entries, ())]):
            why.append(f"{logical}, whose mesh axis {'·'.join(wanted)} splits another dimension")
        elif size % parts:
            why.append(f"{logical} of {size}, no multiple of {'·'.join(wanted)}={parts}")
        else:
            entries.append(wanted)
            continue
        entries.append(())
    return PartitionSpec(*[entry[0] if len(entry) == 1 else entry or None for entry in entries]), why


@dataclass(frozen=True)
class Transfer:
    """Outcome of a transfer.

    Attributes:
        seconds: time from the call until the last array had arrived, or until the transfer failed.
        bytes: size of the arrays moved.
        error: reason of a failure; None if the transfer succeeded.
    """

    seconds: float
    bytes: int
    error: Exception | None = None


def reshard(
    tree: PyTree,
    target_shardings: PyTree,
    donate: bool = False,
    on_done: Callable[[Transfer], None] | None = None,
    *,
    copy: bool = False,
) -> PyTree:
    """Move `tree` to `target_shardings`; the call returns at once, and the arrays arrive later.

    Under Pathways its own resharder moves the arrays, and the call returns after they have arrived. Where arrays or
    targets span several processes, all processes call this, in the same order: arrays that each process holds as a
    whole are divided, and arrays of a mesh over processes may be gathered on the devices of each process.

    Args:
        tree: arrays, in any nesting.
        target_shardings: one sharding for all arrays; or a tree with the same names, of shardings or of arrays that
            have them.
        donate: donate the source: its memory is freed as the arrays leave its devices, and it cannot be used again.
        on_done: called from another thread with the outcome, success or failure.
        copy: copy also arrays that are already on a target device. Otherwise the result shares their buffers with
            `tree`, and an update that donates the one deletes the data of the other.

    Raises:
        CoveyError: the trees do not have the same leaves.
    """
    if on_done is not None:
        return _reported(partial(reshard, tree, target_shardings, donate, copy=copy), tree, on_done)
    target = _shardings_by_name(tree, target_shardings)
    if copy:
        tree = jax.tree.map(lambda x, to: x if _leaves_devices(x, to) else jnp.copy(x), tree, target)
    return _choose_resharder()(tree, target, donate=donate)


def _reported(move: Callable[[], PyTree], tree: PyTree, on_done: Callable[[Transfer], None]) -> PyTree:
    """Return the result of `move`, and report its outcome from a thread, which neither blocks the caller nor raises."""
    started, size, outcome = time.perf_counter(), sum(leaf.nbytes for leaf in jax.tree.leaves(tree)), Future[PyTree]()
    try:
        outcome.set_result(move())
    except Exception as error:
        outcome.set_exception(error)
    threading.Thread(target=_report, args=(outcome, started, size, on_done), name="reshard").start()
    return outcome.result()


def _report(outcome: "Future[PyTree]", started: float, size: int, on_done: Callable[[Transfer], None]) -> None:
    error = None
    try:
        jax.tree.map(_wait_for, outcome.result())
    except Exception as failure:
        error = failure
    on_done(Transfer(time.perf_counter() - started, size, error))


def _wait_for(leaf: jax.Array) -> None:
    """Wait for `leaf`. If it was donated in the meantime, it has been used, and so had arrived."""
    try:
        leaf.block_until_ready()
    except RuntimeError:
        if not leaf.is_deleted():
            raise


def _shardings_by_name(tree: PyTree, target: PyTree) -> PyTree:
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
    """Return the bytes of each process as a row on its first device, filled up with zeros. All processes call this."""
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


def weight_shardings(params: Any, mesh: Mesh | None) -> Any:
    """Return a sharding per weight: by the rules on `mesh`; without a mesh its current one, with automatic axes."""
    return jax.tree.map(lambda x: _with_auto_axes(x.sharding), params) if mesh is None else shardings(params, mesh)


def _with_auto_axes(sharding: Sharding) -> Sharding:
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return NamedSharding(with_auto_axes(sharding.mesh), sharding.spec)
    return sharding


def place_model(model: Model, place: Mesh | jax.Device | None) -> Model:
    """Put `model` on a mesh or a device, or leave it on its devices. Arrays already there are put too: JAX recompiles
    when the device of an argument is chosen and not the default, so it is chosen for all arrays from the start. A model
    of shapes gets the same shardings, and its devices need not exist.

    Raises:
        RecipeError: the mesh has devices of several processes, and the model that these give differs.
    """
    graph, params = nnx.split(model)
    if place is None or isinstance(place, Mesh):
        targets = weight_shardings(params, place)
    else:
        device = SingleDeviceSharding(place)
        targets = jax.tree.map(lambda _: device, params)
    if is_abstract(params):
        return build_for_devices(nnx.merge(graph, jax.tree.map(abstract, params, targets)))
    if isinstance(place, Mesh) and spans_processes(place):
        whole = [x for x in jax.tree.leaves(params) if x.is_fully_addressable]
        processes.here().check_same("model", lambda: fingerprint(whole), "the same weights for all of them")
    return build_for_devices(nnx.merge(graph, reshard(params, targets)))


def fingerprint(tree: Any) -> int:
    """Return the sum of the bits of all arrays of `tree`, a checksum."""
    return int(_bits(tree))


@jax.jit
def _bits(tree: Any) -> jax.Array:
    """Sum the arrays' bits as integers modulo 2³²: the order, and so the sharding, does not matter."""
    total: jax.Array = jnp.uint32(0)
    for x in jax.tree.leaves(tree):
        x = x.astype(jnp.uint8) if x.dtype == bool else x
        total += jnp.sum(jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}"), dtype=jnp.uint32)
    return total


def build_for_devices(model: Model, platform: str | None = None) -> Model:
    """Set the platform of the programs of `model`, in place; by default the platform of its parameters."""
    platform = platform or platform_of(jax.tree.leaves(nnx.state(model))[0].sharding)
    for _, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Module) and hasattr(node, "platform"):
            node.platform = platform
    return model


def put_rows(batch: Tree, like: Any) -> Tree:
    """Put a batch of rows on the devices that hold `like`, divided over their mesh if they have one. On a mesh over
    several processes each process puts the rows of its own devices, and reads no other rows.
    """
    return processes.here().put_host(batch, rows_placement(like))


def rows_placement(like: Any) -> Sharding:
    """Return the sharding of rows on the devices that hold `like`, arrays or shapes."""
    sharding: Sharding = jax.tree.leaves(like)[0].sharding
    return row_sharding(sharding.mesh) if isinstance(sharding, NamedSharding) else sharding


def optimizer_shardings(optimizer: optax.GradientTransformation, params: Any) -> Any:
    """Return a sharding per leaf of the optimizer's state: a moment has the sharding of its parameter."""
    mesh, state = mesh_of(params), jax.eval_shape(optimizer.init, params)
    if mesh is not None:
        return shardings(state, mesh)
    sharding = jax.tree.leaves(params)[0].sharding
    return jax.tree.map(lambda _: sharding, state)
