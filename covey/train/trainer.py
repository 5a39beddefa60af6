"""Trainer: sums gradients over micro-batches and makes one update per step, with any loss.

A micro-batch's loss is a plain sum, returned with its denominator. Both are summed over the step, and the gradient is
divided once, before the update: it does not depend on how a step is split into micro-batches, and training may begin
before the step's last completion exists.
"""

import math
from collections.abc import Iterable
from itertools import chain
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx

from covey.errors import NumbersError
from covey.models.dtypes import round_kernels
from covey.models.layer_stack import LayerStacks
from covey.models.lora import split_trainable
from covey.parallel.shapes import abstract
from covey.train.gradient_sums import GradientSums
from covey.train.optimizers import MATRIX
from covey.train.programs import LOSS, NORM, LossFn, UpdatePrograms
from covey.types import EffectiveShare, Mean, MetricSums

Metrics = dict[str, float]


class MicroBatch(NamedTuple):
    """A micro-batch on its devices, and its contribution to the step's denominator."""

    batch: Any
    denominator: float


class Gradients(NamedTuple):
    """The gradients of a step, which are finite and not applied yet.

    Attributes:
        sums: sums over the step's micro-batches.
        scale: 1 / the step's denominator.
        metrics: see `Trainer.update`.
    """

    sums: GradientSums
    scale: float
    metrics: Metrics


class Trainer:
    """Own the trainable weights of one model and their optimizer.

    Args:
        model: adapters alone are trained; without adapters, every weight. The trainer takes ownership of the trainable
            arrays: their buffers are donated at each update, so nothing else may hold them.
        optimizer: any optax transformation.
        loss_fn: see `LossFn`.
        name: names the model in errors of a run that trains two.

    Attributes:
        trainable, frozen: the two parts of the model's state. `params` is both together.
        opt_state: the optimizer's state.
        programs: the compiled programs.
        step: updates made or skipped. The learning-rate schedule and the dropout of the next update follow it.
    """

    def __init__(self, model: nnx.Module, optimizer: optax.GradientTransformation, loss_fn: LossFn, name: str = ""):
        self.graph: nnx.GraphDef[Any]
        self.graph, self.trainable, self.frozen = split_trainable(model)
        self.name, self.step, self._stacks = name, 0, LayerStacks(model)
        self.programs = UpdatePrograms(model, optimizer, loss_fn)
        self.opt_state = self.programs.init(self.trainable)

    @property
    def params(self) -> nnx.State[Any, Any]:
        """Full state (trainable and frozen) of the decoder's graph."""
        return nnx.merge_state(self.trainable, self.frozen)

    @property
    def last_learning_rate(self) -> float:
        """Learning rate of the matrices in the last update; NaN for an optax transformation, which hides it."""
        return self.programs.learning_rates(self.step - 1).get(MATRIX, math.nan)

    def update(self, micro_batches: Iterable[MicroBatch]) -> Metrics:
        """Make one optimizer step on micro-batches, which may be made while it trains.

        Returns:
            the means of the loss's metrics over the step, `loss`, and `grad_norm` before clipping.

        Raises:
            NumbersError: `loss` or `grad_norm` is not finite; nothing was updated.
        """
        return self.apply(self.gradients(micro_batches))

    def gradients(self, micro_batches: Iterable[MicroBatch]) -> Gradients:
        """Compute the gradients of `update`, with its errors; nothing is changed."""
        programs = self.programs
        grads = programs.zeros(self.trainable)
        frozen = round_kernels(self.frozen, programs.operand_type)
        all_sums: list[MetricSums] = []
        denominator, norm = 0.0, None
        for micro_batch in micro_batches:
            grads, metric_sums = programs.accumulate(self.trainable, frozen, grads, micro_batch.batch, self.step)
            norm = metric_sums.pop(NORM, None)
            all_sums.append(metric_sums)
            denominator += micro_batch.denominator
        if programs.reduce:
            grads = programs.reduce(grads)
        totals = _combine(jax.device_get(all_sums))
        scale = 1 / max(denominator, 1e-9)
        norm = float(programs.norm(grads, 1.0) if norm is None else norm)
        metrics = _metrics(totals, scale) | {"grad_norm": norm * scale}
        self._check_finite(metrics)
        return Gradients(grads, scale, metrics if denominator else metrics | {LOSS: math.nan})

    def apply(self, gradients: Gradients) -> Metrics:
        """Apply the gradients of `update`: one optimizer step."""
        sums, scale = gradients.sums, gradients.scale
        rates = self.programs.learning_rates(self.step)
        self.trainable, self.opt_state = self.programs.apply(self.trainable, self.opt_state, sums, scale, rates)
        self.step += 1
        return gradients.metrics

    def skip(self) -> None:
        """Count a skipped update: weights and moments stay; the learning-rate schedule and the dropout seed advance."""
        self.step += 1

    def _check_finite(self, metrics: Metrics) -> None:
        """Check that loss and gradient norm are finite, before the weights are changed."""
        bad = {name: metrics[name] for name in ("loss", "grad_norm") if not math.isfinite(metrics.get(name, 0.0))}
        if bad:
            raise NumbersError(
                f"update {self.step + 1}{self.name and f' of the {self.name}'} is not finite: "
                + ", ".join(f"{name} {value}" for name, value in bad.items()),
                want="finite numbers; nothing was updated with these",
                fix="a lower learning rate or max_grad_norm, from the last checkpoint or anew",
            )

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as nested dicts, with an array for each weight of each layer."""
        return self._per_layer(self.trainable, self.opt_state)

    def state_shapes(self) -> dict[str, Any]:
        """Return the shapes of `state()` with their shardings."""
        return self._per_layer(abstract(self.trainable), abstract(self.opt_state))

    def _per_layer(self, trainable: Any, opt_state: Any) -> dict[str, Any]:
        return {
            "params": nnx.to_pure_dict(self._stacks.unstack(trainable)),
            "opt_state": self._stacks.unstack(opt_state),
        }

    def load_state(self, state: dict[str, Any], step: int) -> None:
        """Restore a checkpoint's `state()` at `step`."""
        trainable = self._stacks.unstack(abstract(self.trainable))
        nnx.replace_by_pure_dict(trainable, state["params"])
        self.trainable = self._stacks.stack(trainable)
        self.opt_state, self.step = self._stacks.stack(state["opt_state"]), step


class NonFiniteGuard:
    """Skip non-finite updates, up to a budget.

    A skipped update changes no weight and no moment, but counts as a step of the loop, the learning-rate schedule, the
    dropout and the checkpoint.

    Attributes:
        skipped: number of updates skipped so far.
    """

    def __init__(self, budget: int):
        self.budget, self.skipped = budget, 0

    def accept(self, metrics: Metrics) -> Metrics:
        """Return the metrics of an update that was made."""
        return metrics | ({"skipped": 0.0} if self.budget else {})

    def skip(self, error: NumbersError) -> Metrics:
        """Count an update that is not finite, and return its metrics.

        Raises:
            NumbersError: the budget is spent; it is `error`.
        """
        if self.skipped >= self.budget:
            raise error
        self.skipped += 1
        return {"loss": math.nan, "grad_norm": math.nan, "skipped": 1.0}


COMBINE = {"min": np.minimum, "max": np.maximum}
"""Function that combines two values of a metric, by the end of its name; other metrics are added."""
NOTHING = {"min": math.inf, "max": -math.inf}
"""Minimum and maximum over no tokens, by the end of the metric's name."""


def _combine(all_sums: Iterable[MetricSums]) -> MetricSums:
    """Combine the metrics of micro-batches. A micro-batch has none where all groups tied."""
    totals: dict[str, Any] = {}
    with np.errstate(over="ignore", invalid="ignore"):
        for name, value in chain.from_iterable(map(dict.items, all_sums)):
            combine = COMBINE.get(name.rsplit("/", 1)[-1], np.add)
            totals[name] = jax.tree.map(combine, totals[name], value) if name in totals else value
    return totals


def _metrics(totals: MetricSums, scale: float) -> Metrics:
    """Compute the step's metrics: NaN for a minimum or a mean over no tokens."""
    metrics: Metrics = {}
    for name, value in totals.items():
        number = value.value if isinstance(value, Mean | EffectiveShare) else float(value)
        metrics[name] = math.nan if number == NOTHING.get(name.rsplit("/", 1)[-1]) else number
    return metrics | {LOSS: metrics.get(LOSS, 0.0) * scale}
