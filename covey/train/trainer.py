"""Trainer: sums gradients over micro-batches and makes one update per step. Supervised and RL training share it and
differ in their loss.

A micro-batch's loss is a plain sum, returned with its denominator. Both are summed over the step, and the gradient is
divided once, before the update: it does not depend on how a step is split into micro-batches, and training may begin
before the step's last completion exists.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float

from covey.errors import NumbersError
from covey.models.decoder import compiler_options
from covey.models.lora import apply_lora_dropout, split_trainable
from covey.models.operands import operand_type, round_kernels
from covey.parallel import distributed
from covey.parallel.placement import optimizer_shardings
from covey.types import Mean, MetricSums

LossFn = Callable[[Any, Any, Any], tuple[Float[Array, ""], MetricSums]]
"""Function (graph, params, micro-batch) → the sum of the micro-batch's losses, and its contribution to each metric."""

Metrics = dict[str, float]

LOSS = "loss"


class MicroBatch(NamedTuple):
    """A micro-batch on its devices, and its contribution to the step's denominator."""

    batch: Any
    denominator: float


class Gradients(NamedTuple):
    """The gradients of a step, which are finite and not applied yet.

    Attributes:
        sums: sums over the step's micro-batches, float32, one array per trainable array.
        scale: 1 / the step's denominator.
        metrics: see `Trainer.update`.
    """

    sums: Any
    scale: float
    metrics: Metrics


class Trainer:
    """Own the trainable weights of one model and their optimizer.

    Args:
        model: with adapters, only those are trained; else everything. The trainer takes ownership of the trainable
            arrays: their buffers are donated at each update, so nothing else may hold them.
        optimizer: any optax transformation.
        loss_fn: see `LossFn`.
        name: names the model in errors of a run that trains two.

    Attributes:
        trainable, frozen: the two parts of the model's state. `params` is both together.
        opt_state: the optimizer's state.
        step: updates made or skipped. The learning-rate schedule and the dropout of the next update follow it.
    """

    def __init__(self, model: nnx.Module, optimizer: optax.GradientTransformation, loss_fn: LossFn, name: str = ""):
        self.graph: nnx.GraphDef[Any]
        self.graph, self.trainable, self.frozen = split_trainable(model)
        self.optimizer, self.loss_fn, self.name, self.step = optimizer, loss_fn, name, 0
        # Without out_shardings the moments of sharded weights would all be placed on one device, and replicated
        # gradients and weights would come back with another sharding: every function of them would be compiled again.
        state_shardings = optimizer_shardings(optimizer, self.trainable)
        shardings = jax.tree.map(lambda x: x.sharding, self.trainable)
        self.opt_state = jax.jit(optimizer.init, out_shardings=state_shardings)(self.trainable)
        options, self._operand_type = compiler_options(model), operand_type(model)
        self._accumulate = jax.jit(
            self._accumulate_grads, donate_argnums=(2,), out_shardings=(shardings, None), compiler_options=options
        )
        self._no_gradient = jax.jit(optax.tree.zeros_like, static_argnames=("dtype",), out_shardings=shardings)
        self._norm = jax.jit(optax.tree.norm)
        self._apply = jax.jit(
            partial(_apply, optimizer), donate_argnums=(0, 1), out_shardings=(shardings, state_shardings)
        )

    @property
    def params(self) -> nnx.State[Any, Any]:
        """Full state (trainable and frozen) of the decoder's graph."""
        return nnx.merge_state(self.trainable, self.frozen)

    def update(self, parts: Iterable[MicroBatch]) -> Metrics:
        """Make one optimizer step on the micro-batches of `parts`, which may be produced lazily during training.

        Returns:
            the means of the loss's metrics over the step, `loss`, and `grad_norm` before clipping.

        Raises:
            NumbersError: `loss` or `grad_norm` is not finite; nothing was updated.
        """
        return self.apply(self.gradients(parts))

    def gradients(self, parts: Iterable[MicroBatch]) -> Gradients:
        """Compute the gradients of `update`, with its errors; nothing is changed."""
        grads = self._no_gradient(self.trainable, dtype=jnp.float32)
        frozen = round_kernels(self.frozen, self._operand_type)
        shares: list[MetricSums] = []
        denominator = 0.0
        for part in parts:
            grads, metric_sums = self._accumulate(self.trainable, frozen, grads, part.batch, self.step)
            shares.append(metric_sums)
            denominator += part.denominator
        grads, totals, denominator = _sum_over_processes(grads, _combine(jax.device_get(shares)), denominator)
        scale = 1 / max(denominator, 1e-9)
        metrics = _metrics(totals, scale) | {"grad_norm": float(self._norm(grads)) * scale}
        self._refuse_nonfinite(metrics)
        return Gradients(grads, scale, metrics)

    def apply(self, gradients: Gradients) -> Metrics:
        """Apply the gradients of `update`: one optimizer step."""
        sums, scale = gradients.sums, gradients.scale
        self.trainable, self.opt_state = self._apply(self.trainable, self.opt_state, sums, scale, self.step)
        self.step += 1
        return gradients.metrics

    def skip(self) -> None:
        """Count a skipped update: weights and moments stay; the learning-rate schedule and the dropout seed advance."""
        self.step += 1

    def _refuse_nonfinite(self, metrics: Metrics) -> None:
        """Refuse a non-finite loss or gradient norm before the weights are changed."""
        bad = {name: metrics[name] for name in ("loss", "grad_norm") if not math.isfinite(metrics.get(name, 0.0))}
        if bad:
            raise NumbersError(
                f"update {self.step + 1}{self.name and f' of the {self.name}'} is not finite: "
                + ", ".join(f"{name} {value}" for name, value in bad.items()),
                want="finite numbers; nothing was updated with these",
                fix="a lower learning rate or max_grad_norm, from the last checkpoint or anew",
            )

    def _accumulate_grads(
        self, trainable: Any, frozen: Any, grads: Any, batch: Any, step: Any
    ) -> tuple[Any, MetricSums]:
        def loss(trainable: Any) -> tuple[Array, MetricSums]:
            params = apply_lora_dropout(self.graph, nnx.merge_state(trainable, frozen), step)
            total, metric_sums = self.loss_fn(self.graph, params, batch)
            return total, {**metric_sums, LOSS: total}

        share, metrics = jax.grad(loss, has_aux=True)(trainable)
        return jax.tree.map(lambda total, new: total + new.astype(jnp.float32), grads, share), metrics

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as nested dicts of arrays."""
        return {"params": nnx.to_pure_dict(self.trainable), "opt_state": self.opt_state}

    def load_state(self, state: dict[str, Any], step: int) -> None:
        """Restore a checkpoint's `state()` at `step`."""
        nnx.replace_by_pure_dict(self.trainable, state["params"])
        self.opt_state, self.step = state["opt_state"], step


class NonFiniteGuard:
    """Skip non-finite updates, up to a budget.

    A skipped update changes no weight and no moment, but counts as a step of the loop, the learning-rate schedule, the
    dropout and the checkpoint.

    Attributes:
        skipped: number of updates skipped so far.
    """

    def __init__(self, budget: int):
        self.budget, self.skipped = budget, 0

    def guard(
        self, update: Callable[[], Metrics], on_error: Callable[[NumbersError], None], skip: Callable[[], None]
    ) -> Metrics:
        """Return the metrics of `update`. If it is not finite, call `on_error` with the error; then call `skip` while
        the budget lasts, and raise the error after that.

        Raises:
            NumbersError: see `Trainer.update`.
        """
        try:
            return update() | ({"skipped": 0.0} if self.budget else {})
        except NumbersError as error:
            on_error(error)
            if self.skipped >= self.budget:
                raise
            self.skipped += 1
            skip()
            return {"loss": math.nan, "grad_norm": math.nan, "skipped": 1.0}


def _combine(shares: Iterable[MetricSums]) -> MetricSums:
    """Combine the metrics of micro-batches or processes, on the host. Some are empty where all groups tied."""
    with np.errstate(over="ignore", invalid="ignore"):
        return reduce(_add, filter(None, shares), {})


def _add(totals: MetricSums, metric_sums: MetricSums) -> MetricSums:
    combine = {"min": np.minimum, "max": np.maximum}
    return {
        name: jax.tree.map(combine.get(name.rsplit("/", 1)[-1], np.add), totals[name], share) if totals else share
        for name, share in metric_sums.items()
    }


def _sum_over_processes(grads: Any, totals: MetricSums, denominator: float) -> tuple[Any, MetricSums, float]:
    """Sum a step's gradients, metrics and denominator over all processes; with one process, return them unchanged."""
    if distributed.count() == 1:
        return grads, totals, denominator
    everyone = distributed.gathered((totals, denominator), "update")
    combined = _combine(metric_sums for metric_sums, _ in everyone)
    return distributed.summed(grads, "gradients"), combined, sum(part for _, part in everyone)


def _metrics(totals: MetricSums, scale: float) -> Metrics:
    """Compute the step's metrics; those with a count of 0, as when all completions were masked, are 0."""
    means = {
        name: float(value.total) / (float(value.count) or 1.0) if isinstance(value, Mean) else float(value)
        for name, value in totals.items()
    }
    return means | {LOSS: means.get(LOSS, 0.0) * scale}


def _apply(
    optimizer: optax.GradientTransformation, trainable: Any, opt_state: Any, grads: Any, scale: float, step: Any
) -> tuple[Any, Any]:
    grads = jax.tree.map(lambda g: g * scale, grads)
    updates, opt_state = optax.with_extra_args_support(optimizer).update(grads, opt_state, trainable, step=step)
    return optax.apply_updates(trainable, updates), opt_state
