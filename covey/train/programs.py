"""Programs of an optimizer step: the gradients of a micro-batch, their sum over the step, and the update."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import optax
from flax import nnx
from jaxtyping import Array, Float

from covey.models.decoder import Decoder, compiler_options
from covey.models.dtypes import operand_type, round_kernels
from covey.models.lora import apply_lora_dropout, split_trainable
from covey.parallel import processes
from covey.parallel.programs import Program, abstract, takes_shapes
from covey.parallel.sharding import optimizer_shardings
from covey.train.gradient_sums import GradientLayout, GradientSums
from covey.train.layer_updates import LayerUpdates
from covey.train.optimizers import PARAM_GROUPS, LearningRates, ScheduledOptimizer
from covey.types import MetricSums

LossFn = Callable[[Any, Any, Any], tuple[Float[Array, ""], MetricSums]]
"""Function (graph, params, micro-batch) → the sum of the micro-batch's losses, and its contribution to each metric."""

LOSS = "loss"
NORM = "norm of the sums"
"""Name of the norm of the sums of gradients among what `accumulate` returns on accelerators, for which it is then no
program of its own; unless the sums are added up once a step (`reduce`).
"""


class UpdatePrograms:
    """Programs that train one model.

    Args:
        model: on its devices, of arrays or of shapes; with adapters, only those are trained; else everything.
        optimizer: any optax transformation.
        loss_fn: see `LossFn`.

    Attributes:
        graph: the model's graph.
        trainable, frozen: shapes of the two parts of its state.
        operand_type: type to which the frozen kernels are rounded before `accumulate`, see `models.dtypes`.
        init: trainable → the optimizer's first state; shapes → shapes.
        layout: layout of the sums of gradients.
        zeros: trainable → sums of no gradients; shapes → shapes.
        accumulate: trainable, frozen, sums of gradients (donated), micro-batch, step → sums, metrics.
        reduce: sums → sums over all parts of the rows, where each has its own (see `gradient_sums`); else the same.
        norm: sums, scale → the norm of sums · scale.
        apply: trainable, optimizer's state (both donated), sums, scale, learning rates → trainable, optimizer's state.
            It is a program; or calls of some, where layers are a list and the optimizer is a recipe's: `layer_updates`.
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
        sum_shardings, reduced_shardings = self.layout.shardings(), self.layout.shardings(reduced=True)
        self.zeros = takes_shapes(jax.jit(self.layout.zeros, out_shardings=sum_shardings), sum_shardings)
        accumulate = jax.jit(
            partial(accumulate_grads, self.graph, loss_fn, self.layout, self.layout.parts == 1 and _with_norm(model)),
            donate_argnums=(2,),
            out_shardings=(sum_shardings, None),
            compiler_options=compiler_options(model),
        )
        self.accumulate = processes.here().in_order("gradients", accumulate)
        reduce = jax.jit(self.layout.reduce, out_shardings=reduced_shardings)
        self._reduce = processes.here().in_order("reduce", reduce)
        self.reduce = takes_shapes(self._reduce, reduced_shardings) if self.layout.parts > 1 else _unchanged
        self.norm = processes.here().in_order("norm", jax.jit(self.layout.norm))
        self._update: LayerUpdates | WholeUpdate
        if isinstance(optimizer, ScheduledOptimizer) and len(self.layout.layers) > 1:
            self._update = LayerUpdates(optimizer, self.layout, self.norm, self.trainable, state)
        else:
            self._update = WholeUpdate(optimizer, self.layout, self.trainable, state)
        self.init, self.apply = takes_shapes(self._update.init, state_shardings), self._update.apply
        self._rates = optimizer.learning_rates if isinstance(optimizer, ScheduledOptimizer) else None

    def learning_rates(self, step: int) -> dict[str, float]:
        """Return the argument of `apply` for the update `step`; nothing for an optax transformation, which has its own
        rates.
        """
        return self._rates(step) if self._rates else {}

    def gradients_program(self, batch: Any) -> Program:
        """Return the program that adds the gradients of a micro-batch of these shapes to those of the step."""
        frozen = round_kernels(self.frozen, self.operand_type)
        sums = self.zeros(self.trainable)
        return Program("gradients", self.accumulate, (self.trainable, frozen, sums, abstract(batch), 0))

    def reduce_programs(self) -> list[Program]:
        """Return the program that sums the gradients of all parts of the rows, where each has its own."""
        sums = self.zeros(self.trainable)
        return [Program("reduce", self._reduce, (sums,))] if self.layout.parts > 1 else []

    def apply_program(self) -> Program:
        """Return the program of the update; layer by layer, that of the largest part."""
        rates = dict.fromkeys(PARAM_GROUPS if self._rates else (), 1.0)
        return self._update.largest_program(self.reduce(self.zeros(self.trainable)), rates)


class WholeUpdate:
    """The update of all weights by one program; see `LayerUpdates`.

    Args:
        optimizer: any optax transformation.
        layout: layout of the sums of gradients.
        trainable, state: shapes of the weights and of the optimizer's state, on their devices.
    """

    def __init__(self, optimizer: optax.GradientTransformation, layout: GradientLayout, trainable: Any, state: Any):
        self._trainable, self._state = trainable, state
        shardings = jax.tree.map(lambda x: x.sharding, (trainable, state))
        self.init = jax.jit(optimizer.init, out_shardings=shardings[1])
        apply = jax.jit(partial(apply_sums, optimizer, layout), donate_argnums=(0, 1), out_shardings=shardings)
        self.apply: Any = processes.here().in_order("apply", apply)

    def largest_program(self, sums: GradientSums, learning_rates: LearningRates) -> Program:
        """Return the program for sums of these shapes."""
        return Program("apply", self.apply, (self._trainable, self._state, sums, 1.0, learning_rates))


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
    """Add the gradients of the loss on `batch` to `sums`; return these and the contribution to the metrics, with the
    norm of the sums if `with_norm`.
    """

    def loss(trainable: Any) -> tuple[Array, MetricSums]:
        params = apply_lora_dropout(graph, nnx.merge_state(trainable, frozen), step)
        total, metric_sums = loss_fn(graph, params, batch)
        return total, {**metric_sums, LOSS: total}

    sums, metrics = layout.add_gradients(loss, trainable, sums)
    return sums, metrics | ({NORM: optax.tree.norm(layout.as_trainable(sums))} if with_norm else {})


def _unchanged(sums: GradientSums) -> GradientSums:
    return sums


def _with_norm(model: nnx.Module) -> bool:
    return any(node.fixed_shapes for _, node in nnx.iter_graph(model) if isinstance(node, Decoder))


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
