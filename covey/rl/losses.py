"""The loss as algebra: ratio, surrogate, KL and aggregate, each a small pure function over scored tokens [R, M].

Denominators depend on the completions' lengths alone, which are known before any gradient. So they are computed once
for the whole step and travel as one weight a sample; a micro-batch's loss is a plain sum, and gradients do not depend
on how a step is cut.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def token_ratio(logps: Float[Array, "R M"], old_logps: Float[Array, "R M"]) -> Float[Array, "R M"]:
    """exp(logp − logp_old): the importance ratio of each token (Schulman et al., 2017)."""
    return jnp.exp(logps - old_logps)


def clipped_surrogate(
    ratio: Float[Array, "R M"], advantage: Float[Array, "R M"], low: float, high: float
) -> Float[Array, "R M"]:
    """−min(w·A, clip(w, 1 − low, 1 + high)·A) per token (Schulman et al., 2017, eq. 7)."""
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - low, 1 + high) * advantage)


def k3(logps: Float[Array, "R M"], ref_logps: Float[Array, "R M"]) -> Float[Array, "R M"]:
    """exp(d) − d − 1 with d = logp_ref − logp: unbiased, never negative (Schulman, 2020, "Approximating KL
    divergence").
    """
    d = ref_logps - logps
    return jnp.expm1(d) - d


def sequence_mean_weights(lengths: np.ndarray) -> np.ndarray:
    """Weight of each token of sample i so that the sum is mean_i(mean over the sample's tokens): 1 / (B · n_i).

    A sample without tokens weighs 0, never 0/0, and still counts in B.
    """
    return np.where(lengths > 0, 1.0 / (len(lengths) * np.maximum(lengths, 1)), 0.0)


class LossInputs(NamedTuple):
    """What a micro-batch needs beside its rows, each [R, M], 0 at padding, NumPy or JAX.

    Attributes:
        advantage: of the sample, at each of its tokens.
        weight: of the token in the step's loss; sums to at most 1 over the step.
        old_logps: under the policy that sampled; None when this is the batch's only update, where they equal the
            policy's own.
        ref_logps: under the reference; None without a KL term.
        sampled: what the sampler reported for the same tokens; only compared, never used.
    """

    advantage: Float[Any, "R M"]
    weight: Float[Any, "R M"]
    sampled: Float[Any, "R M"]
    old_logps: Float[Any, "R M"] | None = None
    ref_logps: Float[Any, "R M"] | None = None


Shares = dict[str, Float[Array, ""]]
"""A micro-batch's part of each metric: parts are added up, those called `.../min` and `.../max` compared."""


def grpo_loss(
    logps: Float[Array, "R M"],
    entropy: Float[Array, "R M"],
    inputs: LossInputs,
    *,
    beta: float,
    epsilon_low: float,
    epsilon_high: float,
) -> tuple[Float[Array, ""], Shares]:
    """The micro-batch's share of the step's loss, Σ weight · (surrogate + β·KL), and its share of each metric.

    The deviation from Shao et al. (2024): without `old_logps` the ratio is taken against the policy's own detached
    log-probs, whose value is 1 and whose gradient is the policy gradient.
    """
    old = jax.lax.stop_gradient(logps) if inputs.old_logps is None else inputs.old_logps
    ratio, advantage = token_ratio(logps, old), inputs.advantage
    per_token = clipped_surrogate(ratio, advantage, epsilon_low, epsilon_high)
    low, high = (ratio < 1 - epsilon_low) & (advantage < 0), (ratio > 1 + epsilon_high) & (advantage > 0)
    means = {"entropy": entropy, "clip_ratio/low_mean": low, "clip_ratio/high_mean": high}
    means["clip_ratio/region_mean"] = low | high
    if inputs.ref_logps is not None:
        means["kl"] = k3(logps, inputs.ref_logps)
        per_token = per_token + beta * means["kl"]
    means["loss"] = per_token
    loss = jnp.sum(inputs.weight * per_token)
    shares = {name: jnp.sum(inputs.weight * value) for name, value in means.items()} | sampler_shares(old, inputs)
    return loss, jax.lax.stop_gradient(shares)


def sampler_shares(old_logps: Float[Array, "R M"], inputs: LossInputs) -> Shares:
    """How far the trainer's log-probs before any update are from the sampler's, and the ratio of the two."""
    real = inputs.weight > 0
    difference = jnp.where(real, old_logps - inputs.sampled, 0.0)
    ratio = jnp.exp(difference)
    return {
        "sampling/logp_difference/mean": jnp.sum(inputs.weight * jnp.abs(difference)),
        "sampling/logp_difference/max": jnp.max(jnp.abs(difference)),
        "sampling/importance_ratio/mean": jnp.sum(inputs.weight * ratio),
        "sampling/importance_ratio/min": jnp.min(ratio, where=real, initial=jnp.inf),
        "sampling/importance_ratio/max": jnp.max(ratio, where=real, initial=0.0),
    }
