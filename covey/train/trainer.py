"""The trainer: gradients summed over micro-batches, one update a step. Supervised and RL training share it and differ
in their loss.

A loss here is a *share*: summed over the micro-batches of a step it is the step's loss, so its denominators were fixed
before the first micro-batch. Adding shares is then all that gradient accumulation does.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float

from covey.errors import NumbersError
from covey.models.decoder import Decoder
from covey.models.lora import split_trainable
from covey.parallel.placement import optimizer_shardings

LossFn = Callable[[Any, Any, Any], tuple[Float[Array, ""], dict[str, Array]]]
"""(graph, params, micro-batch) → the micro-batch's share of the loss, and of each metric."""

Metrics = dict[str, float]


class Trainer:
    """Owns the trainable weights of one model and their optimizer.

    Args:
        model: with adapters, only those are trained; else everything. The trainer takes the trainable arrays over:
            their buffers are reused at each update, so nothing else may hold them.
        optimizer: any optax transformation.
        loss_fn: see `LossFn`.

    Attributes:
        trainable, frozen: the model's state, split. `params` is both together.
        opt_state: the optimizer's.
        step: updates made.
    """

    def __init__(self, model: Decoder, optimizer: optax.GradientTransformation, loss_fn: LossFn):
        self.graph, self.trainable, self.frozen = split_trainable(model)
        self.optimizer, self.loss_fn, self.step = optimizer, loss_fn, 0
        # Without out_shardings the moments of sharded weights would all land on one device.
        where = optimizer_shardings(optimizer, self.trainable)
        self.opt_state = jax.jit(optimizer.init, out_shardings=where)(self.trainable)
        options = compiler_options()
        self._accumulate = jax.jit(self._share, donate_argnums=(2,), compiler_options=options)
        self._norm = jax.jit(optax.tree.norm)
        self._apply = jax.jit(partial(_apply, optimizer), donate_argnums=(0, 1))

    @property
    def params(self) -> nnx.State:
        """The whole state, as the decoder's graph takes it."""
        return nnx.merge_state(self.trainable, self.frozen)

    def update(self, micro_batches: Iterable[Any]) -> Metrics:
        """One optimizer step on the sum of the micro-batches' losses; metrics are summed alike, `grad_norm` is before
        the clip.
        """
        grads = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32, device=x.sharding), self.trainable)
        totals: dict[str, Array] = {}
        for batch in micro_batches:
            grads, shares = self._accumulate(self.trainable, self.frozen, grads, batch)
            totals = {name: _combined(name, totals.get(name), share) for name, share in shares.items()}
        metrics = {name: float(total) for name, total in totals.items()} | {"grad_norm": float(self._norm(grads))}
        self._refuse_what_is_not_finite(metrics)
        self.trainable, self.opt_state = self._apply(self.trainable, self.opt_state, grads)
        self.step += 1
        return metrics

    def _refuse_what_is_not_finite(self, metrics: Metrics) -> None:
        """The weights are still those of the last good update, and stay so."""
        bad = {name: metrics[name] for name in ("loss", "grad_norm") if not math.isfinite(metrics.get(name, 0.0))}
        if bad:
            raise NumbersError(
                f"update {self.step + 1} is not finite: " + ", ".join(f"{name} {value}" for name, value in bad.items()),
                want="finite numbers; nothing was updated with these",
                fix="a lower learning rate or max_grad_norm, from the last checkpoint or anew",
            )

    def _share(self, trainable: Any, frozen: Any, grads: Any, batch: Any) -> tuple[Any, dict[str, Array]]:
        def loss(trainable: Any) -> tuple[Array, dict[str, Array]]:
            return self.loss_fn(self.graph, nnx.merge_state(trainable, frozen), batch)

        share, metrics = jax.grad(loss, has_aux=True)(trainable)
        return jax.tree.map(lambda total, new: total + new.astype(jnp.float32), grads, share), metrics

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold, as nested dicts of arrays."""
        return {"params": nnx.to_pure_dict(self.trainable), "opt_state": self.opt_state}

    def load_state(self, state: dict[str, Any], step: int) -> None:
        """Takes up a checkpoint's `state()` at `step`."""
        nnx.replace_by_pure_dict(self.trainable, state["params"])
        self.opt_state, self.step = state["opt_state"], step


def _combined(name: str, total: Array | None, share: Array) -> Array:
    """A metric of the step so far: shares add up, except the smallest and the largest values."""
    if total is None:
        return share
    combine = {"min": jnp.minimum, "max": jnp.maximum}.get(name.rsplit("/", 1)[-1], jnp.add)
    return combine(total, share)


def _apply(optimizer: optax.GradientTransformation, trainable: Any, opt_state: Any, grads: Any) -> tuple[Any, Any]:
    updates, opt_state = optimizer.update(grads, opt_state, trainable)
    return optax.apply_updates(trainable, updates), opt_state


def compiler_options() -> dict[str, str]:
    """XLA's memory-saving order of operations on CPU; without it, rematerialised layers that are unrolled save nothing
    there.
    """
    if jax.default_backend() != "cpu":
        return {}
    return {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
