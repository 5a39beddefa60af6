"""Placement of models on meshes, and of host arrays and optimizer state on the devices of their weights."""

from typing import Any, TypeVar

import jax
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding

from covey.parallel import distributed
from covey.parallel.mesh import own_part, platform_of, spans_processes, with_auto_axes
from covey.parallel.programs import abstract
from covey.parallel.reshard import mesh_of, put_host, reshard
from covey.parallel.sharding import row_sharding, shardings

Tree = TypeVar("Tree")
Model = TypeVar("Model", bound=nnx.Module)


def weight_shardings(params: Any, mesh: Mesh | None) -> Any:
    """Return a sharding per weight: by the rules on `mesh`; without one its current sharding, with automatic axes."""
    return jax.tree.map(lambda x: _with_auto_axes(x.sharding), params) if mesh is None else shardings(params, mesh)


def _with_auto_axes(sharding: Sharding) -> Sharding:
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return NamedSharding(with_auto_axes(sharding.mesh), sharding.spec)
    return sharding


def place_model(model: Model, mesh: Mesh | None) -> Model:
    """Put `model` on `mesh`, or leave it on its devices. Arrays already there are put too: JAX recompiles for arguments
    whose device was chosen and not defaulted, so it is chosen for all of them from the start.

    Raises:
        RecipeError: `mesh` has devices of several processes, and the model that these give differs.
    """
    graph, params = nnx.split(model)
    if spans_processes(mesh):
        _refuse_different_models(params)
    return build_for_devices(nnx.merge(graph, reshard(params, weight_shardings(params, mesh))))


def _refuse_different_models(params: Any) -> None:
    """Refuse arrays that every process has as a whole, and that differ between the processes."""
    whole = [x for x in jax.tree.leaves(params) if x.is_fully_addressable]
    fix = "the same weights for all of them"
    distributed.refuse_differences("model", lambda: distributed.fingerprint(whole), fix)


def on_own_devices(params: Tree) -> Tree:
    """Return weights on this process's part of their mesh; themselves if that is the whole mesh."""
    mesh = mesh_of(params)
    if mesh is None or not spans_processes(mesh):
        return params
    own: Tree = reshard(params, shardings(params, own_part(mesh)))
    return own


def place_abstract(model: Model, place: Mesh | jax.Device, platform: str | None = None) -> Model:
    """Return a model of shapes with the shardings that `place_model` gives to one of arrays.

    Args:
        model: with shapes in place of arrays.
        place: a mesh or one device; devices of a description of a topology need not be there.
        platform: the platform for which its programs are built, if it is not that of the devices.
    """
    graph, params = nnx.split(model)
    device = None if isinstance(place, Mesh) else SingleDeviceSharding(place)
    to = shardings(params, place) if isinstance(place, Mesh) else jax.tree.map(lambda _: device, params)
    return build_for_devices(nnx.merge(graph, jax.tree.map(abstract, params, to)), platform)


def build_for_devices(model: Model, platform: str | None = None) -> Model:
    """Set the platform of the programs of `model`, in place: by default that of the devices of its parameters."""
    platform = platform or platform_of(jax.tree.leaves(nnx.state(model))[0].sharding)
    for _, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Module) and hasattr(node, "platform"):
            node.platform = platform
    return model


def put_rows(batch: Tree, like: Any) -> Tree:
    """Put a batch of rows on the devices that hold `like`, divided over their mesh if they have one. Of a mesh over
    several processes, which all have the whole batch, each puts the rows of its own devices.
    """
    return put_host(batch, rows_placement(like))


def rows_placement(like: Any) -> Sharding:
    """Return the sharding of rows on the devices that hold `like`, arrays or shapes."""
    mesh = mesh_of(like)
    sharding: Sharding = row_sharding(mesh) if mesh else jax.tree.leaves(like)[0].sharding
    return sharding


def optimizer_shardings(optimizer: optax.GradientTransformation, params: Any) -> Any:
    """Return a sharding per leaf of the optimizer's state: a moment has the sharding of its parameter."""
    mesh, state = mesh_of(params), jax.eval_shape(optimizer.init, params)
    if mesh is not None:
        return shardings(state, mesh)
    sharding = jax.tree.leaves(params)[0].sharding
    return jax.tree.map(lambda _: sharding, state)
