"""Training of adapters by requests: sums of gradients, and AdamW as each step asks for it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float

from covey.config.schema import LoRAConfig
from covey.losses.logprobs import token_logps
from covey.losses.policy import RATIOS, SURROGATES
from covey.models.decoder import Decoder, num_parameters
from covey.models.dtypes import operand_type, round_kernels
from covey.models.lora import split_trainable, with_lora
from covey.packing.bins import compile_cost
from covey.packing.rows import rows_at_a_time, split_micro_batches
from covey.parallel.arrays import put_rows
from covey.train.gradient_sums import GradientSums
from covey.train.programs import UpdatePrograms
from covey.types import MetricSums
from covey_serve.errors import ApiError
from covey_serve.examples import CLIPS, MAX_TOKENS, Batch, Example, join_targets, make_batch

SETTINGS: dict[str, dict[str, float]] = {
    "cross_entropy": {}, "importance_sampling": {}, "ppo": CLIPS, "cispo": CLIPS, "gspo": CLIPS, "dro": {"beta": 0.05},
}  # fmt: skip
"""Settings of each loss, with their defaults."""


@dataclass
class Trained:
    """A model that a client trains.

    Attributes:
        rank: rank of its adapters; 0 where all weights are trained.
        trainable: the adapters, or all weights.
        moments: state of AdamW.
        steps: number of its steps.
        sums: gradients since the last step; None for none.
        loss: sum of the losses since then.
    """

    rank: int
    trainable: Any
    moments: Any
    steps: int = 0
    sums: GradientSums | None = None
    loss: float = 0.0


def per_token_loss(name: str, logps: Float[Array, "R M"], batch: Batch) -> Float[Array, "R M"]:
    """Compute a loss at each token as Tinker's documentation has it; the client normalises.

    cross_entropy −w·logp; importance_sampling −r·A; ppo −min(r·A, clip(r)·A); cispo −clip(r)·A·logp, no gradient of
    clip(r); dro −(A·logp − β/2·(logp − old)²); gspo is ppo with r = exp of the mean of logp − old over the datum's
    tokens with an advantage (Zheng et al., 2025). r = exp(logp − old).
    """
    loss: Array
    if name == "cross_entropy":
        loss = -batch.weight * logps
        return loss
    if name == "dro":
        loss = -(batch.advantage * logps - batch.beta / 2 * jnp.square(logps - batch.old))
        return loss
    ratios = RATIOS["sequence" if name == "gspo" else "token"]
    ratio = ratios(logps, batch.old, batch.mask > 0, batch.rows.segment_ids)
    if name == "importance_sampling":
        loss = -ratio * batch.advantage
        return loss
    thresholds: Any = SimpleNamespace(epsilon=1 - batch.low, high=batch.high - 1, cap=batch.high, delta=None)
    if name == "cispo":
        return SURROGATES["cispo"](jnp.maximum(ratio, batch.low), logps, batch.advantage, thresholds)
    return SURROGATES["clip"](ratio, logps, batch.advantage, thresholds)


def loss_sum(name: str, graph: Any, params: Any, batch: Batch) -> tuple[Float[Array, ""], MetricSums]:
    """Compute the sum of a loss over all tokens, and the log-probs of the targets. A `LossFn`."""
    logps = token_logps(graph, params, batch.rows, 1.0, entropy_gradient=False).logps
    total = jnp.where(batch.rows.scored, per_token_loss(name, logps, batch), 0.0).sum()
    return total, {"logps": logps}


class Trainer:
    """Gradients and updates of the adapters of all clients on one base, or of all of its weights.

    Args:
        base: the model under the adapters, which never changes.
    """

    def __init__(self, base: Decoder):
        self._base, self._compile_cost = base, compile_cost(num_parameters(base), 1, base.fixed_shapes)
        self._model = cache(self._with_adapters)
        self._frozen = cache(self._round_frozen)
        self.programs = cache(self._programs)
        self.forward = cache(self._forward)
        self._update = cache(self._make_update)

    def create(self, rank: int, seed: int) -> Trained:
        """Return new adapters, which change nothing yet; or for rank 0 all weights of the base."""
        model = with_lora(self._base, LoRAConfig(rank=rank), seed=seed) if rank else self._base
        trainable = split_trainable(model)[1]
        return Trained(rank, trainable, optax.adamw(0.0).init(trainable))

    def gradients(
        self, model: Trained, name: str, examples: Sequence[Example], settings: Mapping[str, float], backward: bool
    ) -> tuple[list[np.ndarray], float]:
        """Add the gradients of a loss to the sums of a model, unless not `backward`; return the log-probs of the
        targets of each example, and the loss.
        """
        by_target = [one for example in examples for one in example.by_target()]
        batch, unpack = make_batch(name, by_target, settings, self._compile_cost)
        programs, frozen = self.programs(model.rank, name), self._frozen(model.rank > 0)
        sums = programs.zeros(model.trainable) if model.sums is None else model.sums
        logps, total = list[np.ndarray](), 0.0
        for part in split_micro_batches(batch, rows_at_a_time(batch.rows, None, MAX_TOKENS)):
            placed = put_rows(part, model.trainable)
            if backward:
                sums, found = programs.accumulate(model.trainable, frozen, sums, placed, 0)
            else:
                found = self.forward(model.rank, name)(nnx.merge_state(model.trainable, frozen), placed)
            logps.append(np.asarray(found["logps"]))
            total += float(found["loss"])
        if backward:
            model.sums, model.loss = sums, model.loss + total
        return join_targets(examples, unpack(np.concatenate(logps)[: len(batch.rows.tokens)])), total

    def step(self, model: Trained, numbers: Mapping[str, float]) -> float:
        """Make a step of AdamW with the gradients since the last one; return their norm before it is clipped.

        Raises:
            ApiError: there are none, or they are not finite.
        """
        if model.sums is None:
            raise ApiError("optim_step comes after forward_backward, and there are no gradients")
        update = self._update(model.rank)
        trainable, moments, norm = update(model.trainable, model.moments, model.sums, dict(numbers))
        model.sums, model.loss = None, 0.0
        if not np.isfinite(norm):
            raise ApiError(f"the norm of the gradients is {norm}; nothing was updated with these")
        model.trainable, model.moments, model.steps = trainable, moments, model.steps + 1
        return float(norm)

    def _with_adapters(self, rank: int) -> Decoder:
        return with_lora(self._base, LoRAConfig(rank=rank)) if rank else self._base

    def _round_frozen(self, has_adapters: bool) -> Any:
        """Return the weights that are not trained, which are the same under adapters of any rank."""
        frozen = split_trainable(self._model(int(has_adapters)))[2]
        return round_kernels(frozen, operand_type(self._base))

    def _programs(self, rank: int, name: str) -> UpdatePrograms:
        return UpdatePrograms(self._model(rank), optax.identity(), partial(loss_sum, name))

    def _forward(self, rank: int, name: str) -> Callable[[Any, Any], Any]:
        graph = split_trainable(self._model(rank))[0]

        @jax.jit
        def forward(params: Any, batch: Batch) -> Any:
            total, found = loss_sum(name, graph, params, batch)
            return found | {"loss": total}

        return forward

    def _make_update(self, rank: int) -> Callable[..., Any]:
        layout = self.programs(rank, "cross_entropy").layout

        @jax.jit
        def update(trainable: Any, moments: Any, sums: GradientSums, numbers: Mapping[str, Any]) -> Any:
            grads = layout.as_trainable(sums)
            norm, most = optax.tree.norm(grads), numbers["grad_clip_norm"]
            scale = jnp.where((most > 0) & (norm > most), most / norm, 1.0)
            names = {"b1": "beta1", "b2": "beta2", "eps": "eps", "weight_decay": "weight_decay"}
            chosen = {ours: numbers[theirs] for ours, theirs in names.items()}
            adamw = optax.adamw(numbers["learning_rate"], **chosen)
            updates, moments = adamw.update(jax.tree.map(lambda g: g * scale, grads), moments, trainable)
            return optax.apply_updates(trainable, updates), moments, norm

        return update
