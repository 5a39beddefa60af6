"""Layers of a decoder as stacks: one array for each weight of like layers that follow one another, [n, ...] over them.

Programs for accelerators scan over stacks and take them as they are; decoding alone, which is unrolled, takes a list,
made for each rollout. On a CPU layers stay a list, whose arrays the loop of `layer_loop` selects. In files they are a
list everywhere: checkpoints, exports and adapters have a tensor per layer, and a learner converts where it takes a
model (`stack_models`) and where it gives one away (`unstack_layers`).
"""

from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from covey.models.decoder import Decoder, Layer
from covey.models.layers import LoRA

Model = TypeVar("Model", bound=nnx.Module)
Tree = TypeVar("Tree")
Path = tuple[Any, ...]


def stack_layers(model: Model) -> Model:
    """Return `model` with stacks of its layers where it is built for an accelerator, else `model` itself.

    Args:
        model: of arrays or of shapes, on its devices.
    """
    return stack_models([model])[0]


def stack_models(models: Sequence[Model]) -> list[Model]:
    """Return the models as `stack_layers` does, each array that several of them share stacked once."""
    stacked: dict[tuple[Any, ...], Any] = {}

    def join(*leaves: Any) -> Any:
        key = tuple(map(buffers, leaves))
        if key not in stacked:
            stacked[key] = _stack(leaves)
        return stacked[key]

    convert = partial(_stack_decoder, join=join)
    return [
        _convert(model, convert) if any(_takes_stacks(x) for _, x in _decoders(model)) else model for model in models
    ]


def unstack_layers(model: Model) -> Model:
    """Return `model` with a list of layers, each with arrays of its own: `model` itself where it has no stacks."""
    return _convert(model, _unstack_decoder) if any(node.stacked for _, node in _decoders(model)) else model


class LayerStacks:
    """Conversion of the states of a model, and of trees like them, between its stacks and a list of layers.

    Args:
        model: the model; without stacks nothing is converted.
    """

    def __init__(self, model: nnx.Module):
        stacked = [(path, decoder) for path, decoder in _decoders(model) if decoder.stacked]
        self._runs = {(*path, "layers"): dict(enumerate(decoder.layer_runs())) for path, decoder in stacked}

    def unstack(self, tree: Tree) -> Tree:
        """Return `tree`, in which states of the model may be nested, with an array per layer for each stack. Shapes
        give shapes.
        """
        return self._convert(tree, self._unstack_state)

    def split(self, state: nnx.State[Any, Any]) -> tuple[nnx.State[Any, Any], nnx.State[Any, Any]]:
        """Return the stacks of a state of the model, and all else in it."""
        flat = nnx.to_flat_state(state)
        stacks = {path: x for path, x in flat if self._find(path)[1]}
        return nnx.from_flat_state(stacks), nnx.from_flat_state({path: x for path, x in flat if path not in stacks})

    def stack(self, tree: Tree) -> Tree:
        """Return the stacked tree: the inverse of `unstack`."""
        return self._convert(tree, self._stack_state)

    def _convert(self, tree: Tree, convert: Any) -> Tree:
        if not self._runs:
            return tree
        converted: Tree = jax.tree.map(lambda x: convert(x) if is_state(x) else x, tree, is_leaf=is_state)
        return converted

    def _unstack_state(self, state: nnx.State[Any, Any]) -> nnx.State[Any, Any]:
        flat: dict[Path, Any] = {}
        for path, leaf in nnx.to_flat_state(state):
            at, runs = self._find(path)
            if not runs:
                flat[path] = leaf
            else:
                run = runs[path[at]]
                parts = _unstack(leaf, len(run))
                flat |= {(*path[:at], number, *path[at + 1 :]): x for number, x in zip(run, parts, strict=True)}
        return nnx.from_flat_state(flat)

    def _stack_state(self, state: nnx.State[Any, Any]) -> nnx.State[Any, Any]:
        flat = dict(nnx.to_flat_state(state))
        stacked: dict[Path, Any] = {}
        for path in list(flat):
            at, runs = self._find(path)
            if not runs:
                stacked[path] = flat.pop(path)
            for number, run in runs.items():
                if run[0] == path[at]:
                    leaves = [flat.pop((*path[:at], layer, *path[at + 1 :])) for layer in run]
                    stacked[*path[:at], number, *path[at + 1 :]] = jax.tree.map(lambda *x: _stack(x), *leaves)
        return nnx.from_flat_state(stacked)

    def _find(self, path: Path) -> tuple[int, dict[Any, range]]:
        """Return the place in `path` of the number of a stack or a layer, and the layers of each stack there by its
        number; none where the path names no layer.
        """
        prefix = next((prefix for prefix in self._runs if path[: len(prefix)] == prefix), ())
        return len(prefix), self._runs.get(prefix, {})


def stacked_sharding(sharding: Sharding) -> Sharding:
    """Return the sharding of arrays stacked along a new first axis, which is not divided."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
    return sharding


def is_state(node: Any) -> bool:
    """Return whether a node of a tree is a state of a model."""
    return isinstance(node, nnx.State)


def _convert(model: Model, convert: Any) -> Model:
    """Return a copy of `model` in which `convert` has changed each decoder; arrays are shared."""
    copy: Model = nnx.merge(*nnx.split(model))
    for _, decoder in list(_decoders(copy)):
        convert(decoder)
    return copy


def _decoders(model: nnx.Module) -> Iterator[tuple[Path, Decoder]]:
    return ((path, node) for path, node in nnx.iter_graph(model) if isinstance(node, Decoder))


def _takes_stacks(decoder: Decoder) -> bool:
    return decoder.platform != "cpu" and not decoder.stacked


def _stack_decoder(decoder: Decoder, join: Any) -> None:
    runs = decoder.layer_runs()
    decoder.layers = nnx.List([_stack_run([decoder.layers[number] for number in run], join) for run in runs])
    decoder.stacked = tuple(map(len, runs))


def _unstack_decoder(decoder: Decoder) -> None:
    pairs = zip(decoder.layers, decoder.stacked, strict=True)
    decoder.layers = nnx.List([layer for stack, count in pairs for layer in _unstack_run(stack, count)])
    decoder.stacked = ()


def _stack_run(layers: Sequence[Layer], join: Any) -> Layer:
    graph, states = nnx.split(layers[0])[0], [nnx.split(layer)[1] for layer in layers]
    stack: Layer = nnx.merge(graph, jax.tree.map(join, *states))
    for stacked, *each in zip(_adapters(stack), *map(_adapters, layers), strict=True):
        stacked.noise = (each[0].noise[0], tuple(lora.noise[1] for lora in each))
    return stack


def _unstack_run(stack: Layer, count: int) -> list[Layer]:
    graph, state = nnx.split(stack)
    layers: list[Layer] = [nnx.merge(graph, part) for part in _unstack(state, count)]
    for stacked, *each in zip(_adapters(stack), *map(_adapters, layers), strict=True):
        for lora, number in zip(each, stacked.noise[1], strict=True):
            lora.noise = (stacked.noise[0], number)
    return layers


def _adapters(layer: Layer) -> list[LoRA]:
    return [node for _, node in nnx.iter_graph(layer) if isinstance(node, LoRA)]


def buffers(x: Any) -> Any:
    """Return the identity of an array's memory, which objects may share; of the object where it has no memory."""
    if not isinstance(x, jax.Array) or x.is_deleted():
        return id(x)
    return x.shape, x.dtype, tuple(piece.data.unsafe_buffer_pointer() for piece in x.addressable_shards)


def _stack(leaves: Sequence[Any]) -> Any:
    first = leaves[0]
    if isinstance(first, jax.ShapeDtypeStruct):
        place = first.sharding and stacked_sharding(first.sharding)
        return first.update(shape=(len(leaves), *first.shape), sharding=place)
    return _stack_program(stacked_sharding(first.sharding))(leaves)


def _unstack(tree: Tree, count: int) -> list[Tree]:
    """Return `count` trees of the parts of the arrays of `tree` along their first axis."""
    leaves, structure = jax.tree.flatten(tree)
    parts = [_unstack_array(x, count) for x in leaves]
    return [jax.tree.unflatten(structure, [part[number] for part in parts]) for number in range(count)]


def _unstack_array(x: Any, count: int) -> list[Any]:
    if isinstance(x, jax.core.Tracer):
        return slices_of_stack(x, count)
    place = x.sharding
    if isinstance(place, NamedSharding):
        place = NamedSharding(place.mesh, PartitionSpec(*place.spec[1:]))
    if isinstance(x, jax.ShapeDtypeStruct):
        return [x.update(shape=x.shape[1:], sharding=place)] * count
    parts: list[Any] = _unstack_program(place, count)(x)
    return parts


@cache
def _stack_program(place: Sharding) -> Any:
    return jax.jit(jnp.stack, out_shardings=place)


@cache
def _unstack_program(place: Sharding, count: int) -> Any:
    return jax.jit(partial(slices_of_stack, count=count), out_shardings=[place] * count)


def slices_of_stack(x: Any, count: int) -> list[Any]:
    return [jax.lax.index_in_dim(x, number, keepdims=False) for number in range(count)]
