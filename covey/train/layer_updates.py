"""The optimizer's update as one program for a layer, called for each layer, and one for the weights outside of layers.

The kernels of a program for all weights grow with the layers, and the time to compile it with them. The optimizer of a
recipe (`ScheduledOptimizer`) updates a weight from its own gradient and moments, and from the norm of all gradients,
which is computed before. Therefore layers with equal shapes can have one program, which names them all alike.

All weights share a program in two cases. An optax transformation that a user gives may compute a weight's update from
other weights. And on accelerators layers are stacks: kernels do not grow with them, and each call costs a launch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import optax
from flax import nnx

from covey.models.layer_stack import is_state
from covey.parallel import processes
from covey.parallel.programs import Program
from covey.train.gradient_sums import GradientLayout, GradientSums
from covey.train.optimizers import LearningRates, ScheduledOptimizer

Leaves = list[Any]
Names = Mapping[str, str]
"""Dotted path of each weight of a part → its dotted path in the program."""


class PartProgram:
    """Program that updates the weights of a part, of which all arrays are lists in the order of their trees.

    Args:
        optimizer: that of a recipe.
        weights, state: structures of the weights and of their part of the optimizer's state.
        in_loops: whether the sum of the gradients of each weight is a stack of a loop over layers.
        places: shardings of weights and state.
    """

    def __init__(self, optimizer: ScheduledOptimizer, weights: Any, state: Any, in_loops: Sequence[bool], places: Any):
        self._optimizer, self._weights, self._state, self._in_loops = optimizer, weights, state, in_loops
        shardings = tuple(map(list, places))
        self.init = jax.jit(self._init, out_shardings=shardings[1])
        apply = jax.jit(self._apply, donate_argnums=(0, 1), out_shardings=shardings)
        self.apply: Any = processes.here().in_order("apply", apply)

    def _init(self, weights: Leaves) -> Leaves:
        return jax.tree.leaves(self._optimizer.init(jax.tree.unflatten(self._weights, weights)))

    def _apply(
        self,
        weights: Leaves,
        state: Leaves,
        sums: Leaves,
        index: int,
        scale: float,
        norm: float,
        learning_rates: LearningRates,
    ) -> tuple[Leaves, Leaves]:
        take = jax.lax.dynamic_index_in_dim
        own = [take(x, index, keepdims=False) if loop else x for x, loop in zip(sums, self._in_loops, strict=True)]
        grads, params = (jax.tree.unflatten(self._weights, x) for x in ([x * scale for x in own], weights))
        old = jax.tree.unflatten(self._state, state)
        updates, new = self._optimizer.update(grads, old, params, learning_rates=learning_rates, norm=norm)
        return jax.tree.leaves(optax.apply_updates(params, updates)), jax.tree.leaves(new)


@dataclass(frozen=True)
class Part:
    """Weights that one call updates; numbers are those of leaves of the whole trees.

    Attributes:
        weights: numbers of its weights in the trainable state.
        state: numbers of its leaves in the optimizer's state. All parts have those that belong to no weight.
        sums: numbers of the sums of its gradients.
        index: the layer's place in sums that are stacks.
        program: parts with equal shapes have the same.
    """

    weights: Sequence[int]
    state: Sequence[int]
    sums: Sequence[int]
    index: int
    program: PartProgram


class LayerUpdates:
    """Updates of a model's trainable weights, layer by layer.

    Args:
        optimizer: that of a recipe.
        layout: layout of the sums of gradients, which has loops over layers.
        norm: the program of `GradientLayout.norm`.
        trainable, state: shapes of the weights and of the optimizer's state, on their devices.

    Attributes:
        parts: the layers; the last one has the weights outside of layers too.
    """

    def __init__(self, optimizer: ScheduledOptimizer, layout: GradientLayout, norm: Any, trainable: Any, state: Any):
        self._clips, self._norm = optimizer.clips, norm
        self._weights, (self._state, self._structure) = jax.tree.leaves(trainable), jax.tree.flatten(state)
        make_program, weights, moments = cache(PartProgram), _numbers(trainable), _numbers(state)
        self._shared = _select(moments, {})[0]
        self.parts = []
        for names in _parts(layout):
            (chosen, structure), (in_state, state_structure) = _select(weights, names), _select(moments, names)
            sums, indices = zip(*(layout.places[number] for number in chosen), strict=True)
            in_loops = tuple(index is not None for index in indices)
            places = _shardings(self._weights, chosen), _shardings(self._state, in_state)
            program = make_program(optimizer, structure, state_structure, in_loops, places)
            index = next((index for index in indices if index is not None), 0)
            self.parts.append(Part(chosen, in_state, sums, index, program))

    def init(self, trainable: Any) -> Any:
        """Return the optimizer's first state."""
        weights, state = jax.tree.leaves(trainable), list[Any](self._state)
        for part in self.parts:
            _put(state, part.state, part.program.init(_pick(weights, part.weights)))
        return jax.tree.unflatten(self._structure, state)

    def apply(
        self, trainable: Any, opt_state: Any, sums: GradientSums, scale: float, learning_rates: LearningRates
    ) -> tuple[Any, Any]:
        """Make the optimizer's step with `sums` · `scale`, as `apply_sums` does; weights and state are donated."""
        (weights, structure), (state, state_structure) = jax.tree.flatten(trainable), jax.tree.flatten(opt_state)
        _put(state, self._shared, jax.device_get(_pick(state, self._shared)))  # each call is given its own, to donate
        numbers = scale, float(self._norm(sums, scale)) if self._clips else 0.0, learning_rates
        totals, new_state = jax.tree.leaves(sums), list(state)
        for part in self.parts:
            own = _pick(weights, part.weights), _pick(state, part.state), _pick(totals, part.sums)
            of_part = part.program.apply(*own, part.index, *numbers)
            _put(weights, part.weights, of_part[0])
            _put(new_state, part.state, of_part[1])
        return jax.tree.unflatten(structure, weights), jax.tree.unflatten(state_structure, new_state)

    def largest_program(self, sums: GradientSums, learning_rates: LearningRates) -> Program:
        """Return the program of the largest part, for sums of these shapes."""
        part = max(self.parts, key=lambda part: sum(x.size for x in _pick(self._weights, part.weights)))
        state = list(self._state)
        _put(state, self._shared, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in _pick(state, self._shared)])
        own = _pick(self._weights, part.weights), _pick(state, part.state), _pick(jax.tree.leaves(sums), part.sums)
        return Program("apply", part.program.apply, (*own, part.index, 1.0, 1.0, learning_rates))


def _parts(layout: GradientLayout) -> list[Names]:
    """Return the names of the weights of each part: a layer each, and the last layer with the weights outside of layers.

    XLA rounds otherwise where a transformation updates one weight only: it divides by the bias correction, a number
    with a single use, through its reciprocal. A single weight outside of layers is therefore no part.
    """
    *layers, last = layout.layers
    if layout.outside:
        last = {name: name for name in (*layout.outside, *last)}
    return [*layers, last]


def _numbers(tree: Any) -> Any:
    """Return `tree` with the number of each leaf in its place."""
    structure = jax.tree.structure(tree)
    return jax.tree.unflatten(structure, range(structure.num_leaves))


def _select(tree: Any, names: Names) -> tuple[Leaves, Any]:
    """Return the leaves and the structure of `tree` where its states have only the weights in `names`, so named."""

    def chosen(node: Any) -> Any:
        if not is_state(node):
            return node
        flat = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(node)}
        return nnx.from_flat_state({tuple(new.split(".")): flat[old] for old, new in names.items() if old in flat})

    return jax.tree.flatten(jax.tree.map(chosen, tree, is_leaf=is_state))


def _pick(leaves: Sequence[Any], numbers: Sequence[int]) -> Leaves:
    return [leaves[number] for number in numbers]


def _put(leaves: Leaves, numbers: Sequence[int], values: Sequence[Any]) -> None:
    for number, value in zip(numbers, values, strict=True):
        leaves[number] = value


def _shardings(leaves: Sequence[Any], numbers: Sequence[int]) -> tuple[Any, ...]:
    return tuple(x.sharding for x in _pick(leaves, numbers))
