"""Programs of an optimizer step: the gradients of a micro-batch, their sum over the step, and the update.

The update is one program for a layer, called for each layer. The kernels of a program for all weights would grow with
the layers, and the time to compile it with them. The optimizer of a recipe (`ScheduledOptimizer`) updates a weight from
its own gradient and moments, and from the norm of all gradients, which is computed before. Therefore layers with equal
shapes share a program.

All weights have one program in two cases. A user's optax transformation may compute a weight's update from other
weights. And on accelerators layers are stacks: kernels do not grow with the layers, and each call costs a launch.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import optax
from flax import nnx
from jaxtyping import Array, Float

from covey.models.decoder import Decoder, compiler_options
from covey.models.dtypes import operand_type
from covey.models.layer_stack import is_state
from covey.models.lora import apply_lora_dropout, split_trainable
from covey.parallel import processes
from covey.parallel.arrays import dotted_path, optimizer_shardings
from covey.parallel.shapes import abstract, takes_shapes
from covey.train.gradient_sums import GradientLayout, GradientSums
from covey.train.optimizers import LearningRates, ScheduledOptimizer
from covey.types import MetricSums

LossFn = Callable[[Any, Any, Any], tuple[Float[Array, ""], MetricSums]]
"""Function (graph, params, micro-batch) → the sum of the micro-batch's losses, and its contribution to each metric."""

Leaves = list[Any]
Names = Mapping[str, str]
"""Dotted path of each weight of a part → its dotted path in the program."""

LOSS = "loss"
NORM = "norm of the sums"
"""Key of the norm of the sums of gradients in the metrics of `accumulate`. Accelerators compute it there, and not in a
program of its own, unless the sums are added up once a step (`reduce`).
"""


class UpdatePrograms:
    """Programs that train one model.

    Args:
        model: on its devices, of arrays or of shapes. Adapters alone are trained; without adapters, every weight.
        optimizer: any optax transformation.
        loss_fn: see `LossFn`.

    Attributes:
        graph: the model's graph.
        trainable, frozen: shapes of the two parts of its state.
        operand_type: type to which the frozen kernels are rounded before `accumulate`, see `models.dtypes`.
        init: trainable → the optimizer's first state; shapes → shapes.
        layout: layout of the sums of gradients.
        zeros: trainable → sums of no gradients.
        accumulate: trainable, frozen, sums of gradients (donated), micro-batch, step → sums, metrics.
        reduce: sums → sums over all parts of the rows; None where there are no parts (see `gradient_sums`).
        norm: sums, scale → the norm of sums · scale.
        update: the update, of all weights or layer by layer.
        apply: trainable, optimizer's state (both donated), sums, scale, learning rates → trainable, optimizer's state.
            It calls one program, or one for each layer.
    """

    def __init__(self, model: nnx.Module, optimizer: optax.GradientTransformation, loss_fn: LossFn):
        self.graph: nnx.GraphDef[Any]
        self.graph, trainable, frozen = split_trainable(model)
        self.trainable, self.frozen = abstract(trainable), abstract(frozen)
        self.operand_type = operand_type(model)
        # Without out_shardings the moments of sharded weights would all be placed on one device, and replicated
        # gradients and weights would come back with another sharding: every function of them would be compiled again.
        state_shardings = optimizer_shardings(optimizer, trainable)
        state = jax.tree.map(abstract, jax.eval_shape(optimizer.init, trainable), state_shardings)
        self.layout = GradientLayout(model, trainable)
        sum_shardings = self.layout.shardings()
        self.zeros = jax.jit(self.layout.zeros, out_shardings=sum_shardings)
        accumulate = jax.jit(
            partial(accumulate_grads, self.graph, loss_fn, self.layout, self.layout.parts == 1 and _with_norm(model)),
            donate_argnums=(2,),
            out_shardings=(sum_shardings, None),
            compiler_options=compiler_options(model),
        )
        self.accumulate = processes.here().in_order("gradients", accumulate)
        reduce = jax.jit(self.layout.reduce, out_shardings=self.layout.shardings(reduced=True))
        self.reduce = processes.here().in_order("reduce", reduce) if self.layout.parts > 1 else None
        self.norm = processes.here().in_order("norm", jax.jit(self.layout.norm))
        self.update: LayerUpdates | WholeUpdate
        if isinstance(optimizer, ScheduledOptimizer) and len(self.layout.layers) > 1:
            self.update = LayerUpdates(optimizer, self.layout, self.norm, self.trainable, state)
        else:
            self.update = WholeUpdate(optimizer, self.layout, self.trainable, state)
        self.init, self.apply = takes_shapes(self.update.init, state_shardings), self.update.apply
        self._rates = optimizer.learning_rates if isinstance(optimizer, ScheduledOptimizer) else None

    def learning_rates(self, step: int) -> dict[str, float]:
        """Return the learning rates of the update `step`; none for an optax transformation, which has its own."""
        with on_host():
            rates: dict[str, float] = jax.tree.map(float, jax.device_get(self._rates(step) if self._rates else {}))
        return rates


def on_host() -> AbstractContextManager[Any]:
    """Return a context in which JAX computes on the host's processor, if it may use that: for a few numbers."""
    try:
        context: AbstractContextManager[Any] = jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # JAX_PLATFORMS leaves out the processor
        return nullcontext()
    return context


def accumulate_grads(
    graph: nnx.GraphDef[Any],
    loss_fn: LossFn,
    layout: GradientLayout,
    with_norm: bool,
    trainable: Any,
    frozen: Any,
    sums: GradientSums,
    batch: Any,
    step: Any,
) -> tuple[GradientSums, MetricSums]:
    """Return `sums` with the gradients of the loss on `batch`, and the batch's contribution to the metrics."""

    def loss(trainable: Any) -> tuple[Array, MetricSums]:
        params = apply_lora_dropout(graph, nnx.merge_state(trainable, frozen), step)
        total, metric_sums = loss_fn(graph, params, batch)
        return total, {**metric_sums, LOSS: total}

    sums, metrics = layout.add_gradients(loss, trainable, sums)
    return sums, metrics | ({NORM: optax.tree.norm(layout.as_trainable(sums))} if with_norm else {})


def _with_norm(model: nnx.Module) -> bool:
    return any(node.fixed_shapes for _, node in nnx.iter_graph(model) if isinstance(node, Decoder))


class WholeUpdate:
    """The update of all weights by one program; see `LayerUpdates`.

    Args:
        optimizer: any optax transformation.
        layout: layout of the sums of gradients.
        trainable, state: shapes of the weights and of the optimizer's state, on their devices.
    """

    def __init__(self, optimizer: optax.GradientTransformation, layout: GradientLayout, trainable: Any, state: Any):
        shardings = jax.tree.map(lambda x: x.sharding, (trainable, state))
        self.init = jax.jit(optimizer.init, out_shardings=shardings[1])
        apply = jax.jit(partial(apply_sums, optimizer, layout), donate_argnums=(0, 1), out_shardings=shardings)
        self.apply: Any = processes.here().in_order("apply", apply)


def apply_sums(
    optimizer: optax.GradientTransformation,
    layout: GradientLayout,
    trainable: Any,
    opt_state: Any,
    sums: GradientSums,
    scale: float,
    learning_rates: LearningRates,
) -> tuple[Any, Any]:
    """Make the optimizer's step with `sums` · `scale`; return the new weights and the optimizer's new state."""
    grads = jax.tree.map(lambda g: g * scale, layout.as_trainable(sums))
    update = optax.with_extra_args_support(optimizer).update
    updates, opt_state = update(grads, opt_state, trainable, learning_rates=learning_rates)
    return optax.apply_updates(trainable, updates), opt_state


class PartProgram:
    """Program that updates the weights of a part. All arrays are lists in the order of their trees.

    Args:
        optimizer: optimizer of a recipe.
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
    """Weights that one call updates. Numbers count the leaves of the whole trees.

    Attributes:
        weights: numbers of the part's weights in the trainable state.
        state: numbers of its leaves in the optimizer's state. All parts have the leaves that belong to no weight.
        sums: numbers of the sums of its gradients.
        index: place of the layer in sums that are stacks.
        program: program that parts with equal shapes share.
    """

    weights: Sequence[int]
    state: Sequence[int]
    sums: Sequence[int]
    index: int
    program: PartProgram


class LayerUpdates:
    """Updates of a model's trainable weights, layer by layer.

    Args:
        optimizer: optimizer of a recipe.
        layout: layout of the sums of gradients, which has loops over layers.
        norm: the program of `GradientLayout.norm`.
        trainable, state: shapes of the weights and of the optimizer's state, on their devices.

    Attributes:
        parts: the layers, then all other weights.
        shared: numbers of the leaves of the optimizer's state that belong to no weight.
    """

    def __init__(self, optimizer: ScheduledOptimizer, layout: GradientLayout, norm: Any, trainable: Any, state: Any):
        self._clips, self._norm = optimizer.clips, norm
        leaves, (self._state, self._structure) = jax.tree.leaves(trainable), jax.tree.flatten(state)
        make_program, weights, moments = cache(PartProgram), _numbers(trainable), _numbers(state)
        self.shared = _select(moments, {})[0]
        self.parts = []
        for names in _parts(layout, _transformations(optimizer, trainable)):
            (chosen, structure), (in_state, state_structure) = _select(weights, names), _select(moments, names)
            sums, indices = zip(*(layout.places[number] for number in chosen), strict=True)
            in_loops = tuple(index is not None for index in indices)
            places = _shardings(leaves, chosen), _shardings(self._state, in_state)
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
        _put(state, self.shared, jax.device_get(_pick(state, self.shared)))  # each call donates a copy
        numbers = scale, float(self._norm(sums, scale)) if self._clips else 0.0, learning_rates
        totals, new_state = jax.tree.leaves(sums), list(state)
        for part in self.parts:
            own = _pick(weights, part.weights), _pick(state, part.state), _pick(totals, part.sums)
            of_part = part.program.apply(*own, part.index, *numbers)
            _put(weights, part.weights, of_part[0])
            _put(new_state, part.state, of_part[1])
        return jax.tree.unflatten(structure, weights), jax.tree.unflatten(state_structure, new_state)


def _transformations(optimizer: ScheduledOptimizer, trainable: Any) -> dict[str, str]:
    """Return the name of the transformation that updates each weight, by the weight's dotted path."""
    leaves = jax.tree_util.tree_flatten_with_path(trainable)[0]
    return {dotted_path(path): optimizer.transformation(path, leaf) for path, leaf in leaves}


def _parts(layout: GradientLayout, transformations: Mapping[str, str]) -> list[Names]:
    """Return the names of the weights of each part.

    Where a transformation updates a single weight, XLA rounds in another way: it divides by the bias correction, a
    number with one use, through its reciprocal. Then the last layer shares a part with the weights outside of layers.
    """
    *layers, last = layout.layers
    outside = {name: name for name in layout.outside}
    all_of, outside_of = Counter(transformations.values()), Counter(transformations[name] for name in outside)
    if any(count == 1 < all_of[name] for name, count in outside_of.items()):
        return [*layers, outside | {name: name for name in last}]
    return [*layers, last, *([outside] if outside else [])]


def _numbers(tree: Any) -> Any:
    """Return `tree` with the number of each leaf in its place."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, range(len(leaves)))


def _select(tree: Any, names: Names) -> tuple[Leaves, Any]:
    """Return the leaves and the structure of `tree` where its states have only the weights in `names`, so named."""

    def chosen(node: Any) -> Any:
        if not is_state(node):
            return node
        flat = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(node)}
        renamed: Any = {tuple(new.split(".")): flat[old] for old, new in names.items() if old in flat}
        return nnx.from_flat_state(renamed)

    return jax.tree.flatten(jax.tree.map(chosen, tree, is_leaf=is_state))


def _pick(leaves: Sequence[Any], numbers: Sequence[int]) -> Leaves:
    return [leaves[number] for number in numbers]


def _put(leaves: Leaves, numbers: Sequence[int], values: Sequence[Any]) -> None:
    for number, value in zip(numbers, values, strict=True):
        leaves[number] = value


def _shardings(leaves: Sequence[Any], numbers: Sequence[int]) -> tuple[Any, ...]:
    return tuple(x.sharding for x in _pick(leaves, numbers))
