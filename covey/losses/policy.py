"""The policy loss, composed of ratio, surrogate, aggregate and KL: small pure functions over scored tokens [R, M].

A micro-batch's loss is a plain sum Σ weight·l over its tokens. The denominator depends on the completions' lengths
alone and is kept separate; the trainer sums both over the step and divides once. So gradients do not depend on how a
step is split into micro-batches.

No exponential here may overflow: exponents are clamped at `MAX_EXPONENT`, far beyond any clip. A token beyond it gives
a large finite number and no gradient, instead of inf·0.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from covey.config.algorithms import Algorithm
from covey.types import EffectiveShare, Mean, MetricSums

MAX_EXPONENT = 20.0
"""Largest exponent: e^20 is 5e8."""

PerToken = Float[Array, "R M"]
Ratio = Callable[[PerToken, PerToken, Bool[Array, "R M"], Int[Array, "R M"]], PerToken]
"""Function (logps, old logps, tokens in the loss, segment_ids) → importance ratio at each token."""
Surrogate = Callable[[PerToken, PerToken, PerToken, Algorithm], PerToken]
"""Function (ratio, logps, advantage, algorithm) → loss at each token. `policy_loss` also accepts a custom one."""
Aggregate = Callable[[Int[np.ndarray, "B"], int], tuple[Float[np.ndarray, "B"], float]]
"""Function (tokens in the loss per completion, max_new_tokens) → weight of each token per completion, denominator."""


class LossInputs(NamedTuple):
    """Inputs of the policy loss besides the rows: each [R, M] float32, 0 at padding, NumPy or JAX.

    Attributes:
        advantage: advantage of the token: its completion's, or its own (PPO).
        weight: weight of the token in the sum, from `AGGREGATES`; positive exactly where the token is in the loss.
        rollout_logps: log-prob that the sampler reported.
        beta: [R, 1], weight of the KL term: data, because it may adapt; one per row, so that it is split with the rows.
        old_logps: log-probs under the policy that sampled; None when this is the batch's only update, where they equal
            the policy's own.
        ref_logps: log-probs under the reference; None without a reference.
        keys: [R, M, 2] uint32, random key that drew the token; 0 where the model drew none. None where the metric
            `sampling/token_agreement` is not computed.
    """

    advantage: Float[Any, "R M"]
    weight: Float[Any, "R M"]
    rollout_logps: Float[Any, "R M"]
    beta: Float[Any, "R 1"]
    old_logps: Float[Any, "R M"] | None = None
    ref_logps: Float[Any, "R M"] | None = None
    keys: UInt32[Any, "R M 2"] | None = None


def policy_loss(
    algorithm: Algorithm,
    logps: PerToken,
    entropy: PerToken,
    segment_ids: Int[Array, "R M"],
    inputs: LossInputs,
    surrogate: Surrogate | None = None,
) -> tuple[Float[Array, ""], MetricSums]:
    """Compute Σ weight·(surrogate·correction + beta·KL − entropy_bonus·entropy) of a micro-batch, and its metrics.

    Args:
        algorithm: names of the functions, and their settings.
        logps: log-probs under the policy; differentiable.
        entropy: entropy of the policy where the token was sampled, in nats; differentiable.
        segment_ids: number of the token's completion in its row, from 1; 0 is padding.
        inputs: see `LossInputs`.
        surrogate: replaces the algorithm's.

    Returns:
        The sum, to be divided by the step's denominator, and its part of the metrics, whose means are weighted.
        Without `old_logps` the ratio is taken against the policy's own detached log-probs: its value is 1, its
        gradient the policy gradient.
    """
    weight, advantage, mask = inputs.weight, inputs.advantage, inputs.weight > 0
    old = jax.lax.stop_gradient(logps) if inputs.old_logps is None else inputs.old_logps
    ratio = RATIOS[algorithm.ratio](logps, old, mask, segment_ids)
    per_token = (surrogate or SURROGATES[algorithm.surrogate])(ratio, logps, advantage, algorithm)
    means = {"entropy": entropy}
    if surrogate is None and algorithm.surrogate in CLIP_METRICS:
        means |= CLIP_METRICS[algorithm.surrogate](ratio, advantage, algorithm)
    if algorithm.correction != "none":
        correction = sampler_correction(algorithm, old, inputs.rollout_logps, mask, segment_ids)
        per_token = per_token * correction
        means |= {"sampling/correction/mean": correction, "sampling/correction/masked": correction == 0.0}
    if inputs.ref_logps is not None:
        means["kl"] = KLS[algorithm.kl](logps, inputs.ref_logps)
        per_token = per_token + inputs.beta * means["kl"] if algorithm.kl_in == "loss" else per_token
    if algorithm.entropy_bonus:
        per_token = per_token - algorithm.entropy_bonus * entropy
    metric_sums = sampler_metric_sums(old, inputs)
    if algorithm.correction != "none":
        metric_sums["sampling/correction/effective"] = effective_share_sums(correction, mask)
    metric_sums |= {name: weighted_mean_sums(value, weight) for name, value in means.items()}
    return jnp.sum(weight * per_token), jax.lax.stop_gradient(metric_sums)


def weighted_mean_sums(values: PerToken, weight: PerToken) -> Mean:
    """Return Σ weight·value and Σ weight."""
    return Mean(jnp.sum(weight * values), jnp.sum(weight))


def effective_share_sums(values: PerToken, mask: Bool[Array, "R M"]) -> EffectiveShare:
    """Return the sums of `EffectiveShare` over the tokens where `mask` is True."""
    kept = jnp.where(mask, values, 0.0)
    return EffectiveShare(jnp.sum(kept), jnp.sum(jnp.square(kept)), jnp.sum(mask))


def sampler_metric_sums(old_logps: PerToken, inputs: LossInputs) -> MetricSums:
    """Compare the trainer's log-probs before any update with the sampler's: their difference and their ratio."""
    real = inputs.weight > 0
    difference = jnp.where(real, old_logps - inputs.rollout_logps, 0.0)
    ratio = _clamped_exp(difference)
    return {
        "sampling/logp_difference/mean": weighted_mean_sums(jnp.abs(difference), inputs.weight),
        "sampling/logp_difference/max": jnp.max(jnp.abs(difference), where=real, initial=-jnp.inf),
        "sampling/importance_ratio/mean": weighted_mean_sums(ratio, inputs.weight),
        "sampling/importance_ratio/min": jnp.min(ratio, where=real, initial=jnp.inf),
        "sampling/importance_ratio/max": jnp.max(ratio, where=real, initial=-jnp.inf),
    }


def sampler_correction(
    algorithm: Algorithm,
    old_logps: PerToken,
    rollout_logps: PerToken,
    mask: Bool[Array, "R M"],
    segment_ids: Int[Array, "R M"],
) -> PerToken:
    """Compute the importance weight that corrects for a sampler whose log-probs differ from the trainer's (Yao et al.,
    2025, "Your efficient RL framework secretly brings you off-policy RL training"): ρ = exp(logp_trainer −
    logp_sampler), no gradient.

    ρ is the ratio of the token, of the whole completion (`sequence_...`), or the geometric mean over the completion's
    tokens (`geometric_...`), which does not grow with its length. `..._truncate` clips ρ to [floor, cap]. `..._mask` is
    ρ, and 0 outside (tokens: IcePop, Ling Team, 2025; completions: Liu et al., 2025, "When Speed Kills Stability").
    """
    level, cut = algorithm.correction.split("_")
    rho = jax.lax.stop_gradient(CORRECTION_LEVELS[level](old_logps, rollout_logps, mask, segment_ids))
    low, high = algorithm.smallest_correction, algorithm.correction_cap
    bounded = jnp.where(rho > high, high if cut == "truncate" else 0.0, rho)
    return jnp.where(rho < low, low if cut == "truncate" else 0.0, bounded) if low else bounded


# --- ratios


def token_ratio(logps: PerToken, old: PerToken, mask: Bool[Array, "R M"], segment_ids: Int[Array, "R M"]) -> PerToken:
    """Compute exp(logp − logp_old), the importance ratio of each token (Schulman et al., 2017)."""
    return _clamped_exp(logps - old)


def sequence_ratio(
    logps: PerToken, old: PerToken, mask: Bool[Array, "R M"], segment_ids: Int[Array, "R M"]
) -> PerToken:
    """Compute exp of the mean of logp − logp_old over the completion's tokens, at each of them (Zheng et al., 2025,
    eq. 7).

    A completion without tokens in the loss has ratio 1.
    """
    return _clamped_exp(segment_mean(logps - old, mask, segment_ids))


def whole_sequence_ratio(
    logps: PerToken, old: PerToken, mask: Bool[Array, "R M"], segment_ids: Int[Array, "R M"]
) -> PerToken:
    """Compute the ratio of the probabilities of the whole completion, the product over its tokens, at each of them."""
    total, _ = _segment_sums(logps - old, mask, segment_ids)
    return _clamped_exp(total)


def sequence_token_ratio(
    logps: PerToken, old: PerToken, mask: Bool[Array, "R M"], segment_ids: Int[Array, "R M"]
) -> PerToken:
    """Compute `sequence_ratio` with the gradient of the token's own log-prob: ∂/∂logp_t is the ratio itself
    (Zheng et al., 2025, section 4.3).
    """
    one_with_gradient = jnp.exp(logps - jax.lax.stop_gradient(logps))
    return jax.lax.stop_gradient(sequence_ratio(logps, old, mask, segment_ids)) * one_with_gradient


def segment_mean(values: PerToken, mask: Bool[Array, "R M"], segment_ids: Int[Array, "R M"]) -> PerToken:
    """Compute the mean over the masked tokens of the same segment, at each token; 0 where there are none.

    It compares all pairs, O(M²) as attention does: this works row by row under any mesh and any vmap, and unlike a
    scatter it adds in the same order every time.
    """
    total, count = _segment_sums(values, mask, segment_ids)
    return total / jnp.maximum(count, 1)


def _segment_sums(
    values: PerToken, mask: Bool[Array, "R M"], segment_ids: Int[Array, "R M"]
) -> tuple[PerToken, Int[Array, "R M"]]:
    """Compute the sum over the masked tokens of the same segment, and their number, at each token."""
    together = (segment_ids[..., :, None] == segment_ids[..., None, :]) & mask[..., None, :]
    return jnp.sum(jnp.where(together, values[..., None, :], 0.0), axis=-1), jnp.sum(together, axis=-1)


# --- surrogates


def clip(ratio: PerToken, logps: PerToken, advantage: PerToken, algorithm: Algorithm) -> PerToken:
    """Compute −min(min(w, δ)·A, clip(w, 1 − ε_low, 1 + ε_high)·A) (Schulman et al., 2017, eq. 7;
    δ: INTELLECT-2, 2025).

    On the bound itself the gradient is the unclipped one.
    """
    free = ratio if algorithm.delta is None else _clip_with_bound_grad(ratio, -jnp.inf, algorithm.delta)
    bounded = _clip_with_bound_grad(ratio, 1 - algorithm.epsilon, 1 + algorithm.high)
    return -jnp.where(free * advantage <= bounded * advantage, free, bounded) * advantage


def dual_clip(ratio: PerToken, logps: PerToken, advantage: PerToken, algorithm: Algorithm) -> PerToken:
    """Compute `clip`, for A < 0 at most c·|A| (Ye et al., 2020, "Mastering complex control in MOBA games")."""
    loss, most = clip(ratio, logps, advantage, algorithm), -algorithm.dual_clip * advantage
    return jnp.where((advantage < 0) & (loss > most), most, loss)


def cispo(ratio: PerToken, logps: PerToken, advantage: PerToken, algorithm: Algorithm) -> PerToken:
    """Compute −stop_gradient(min(w, cap))·A·logp (MiniMax, 2025, eq. 4): capped tokens keep their gradient."""
    return -jax.lax.stop_gradient(jnp.minimum(ratio, algorithm.cap)) * advantage * logps


def reinforce(ratio: PerToken, logps: PerToken, advantage: PerToken, algorithm: Algorithm) -> PerToken:
    """Compute −A·logp (Williams, 1992)."""
    return -advantage * logps


def sapo(ratio: PerToken, logps: PerToken, advantage: PerToken, algorithm: Algorithm) -> PerToken:
    """Compute −σ(τ(w − 1))·4/τ·A, τ by the sign of A (Gao et al., 2025): at w = 1 its slope is −A."""
    tau = jnp.where(advantage > 0, algorithm.sapo_positive, algorithm.sapo_negative)
    return -jax.nn.sigmoid(tau * (ratio - 1)) * 4 / tau * advantage


# --- tokens that the surrogates clip


def clip_metrics(ratio: PerToken, advantage: PerToken, algorithm: Algorithm) -> dict[str, PerToken]:
    """Return the tokens whose gradient `clip` stops: below, above, and either (beyond δ included, for A < 0 beyond the
    larger of δ and 1 + ε_high).

    A sequence-level ratio counts all tokens of its completion, so that the metrics are fractions of completions in the
    weights of the aggregate.
    """
    low, high = (ratio < 1 - algorithm.epsilon) & (advantage < 0), (ratio > 1 + algorithm.high) & (advantage > 0)
    delta = jnp.inf if algorithm.delta is None else algorithm.delta
    bound = jnp.where(advantage < 0, jnp.maximum(delta, 1 + algorithm.high), delta)
    beyond = (ratio > bound) & (advantage != 0)
    return _clip_ratios(low, high, low | high | beyond)


def dual_clip_metrics(ratio: PerToken, advantage: PerToken, algorithm: Algorithm) -> dict[str, PerToken]:
    """Return the tokens of `clip_metrics`; `region` also has the tokens with A < 0 that are beyond c."""
    parts = clip_metrics(ratio, advantage, algorithm)
    beyond = (ratio > algorithm.dual_clip) & (advantage < 0)
    return parts | {"clip_ratio/region_mean": parts["clip_ratio/region_mean"] | beyond}


def cispo_metrics(ratio: PerToken, advantage: PerToken, algorithm: Algorithm) -> dict[str, PerToken]:
    """Return the tokens that `cispo` weighs less than their ratio; none of them loses its gradient."""
    high = ratio > algorithm.cap
    return _clip_ratios(jnp.zeros_like(high), high, high)


def _clip_ratios(low: PerToken, high: PerToken, region: PerToken) -> dict[str, PerToken]:
    return {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": region}


# --- estimators of the KL to the reference (Schulman, 2020, "Approximating KL divergence"), d = logp_ref − logp; of
# JAX arrays in the loss, of NumPy arrays in the reward


def k1(logps: PerToken, ref_logps: PerToken) -> PerToken:
    """Compute −d: unbiased, of either sign. Use it in the reward and metrics: as a loss its expected gradient is 0."""
    return logps - ref_logps


def k2(logps: PerToken, ref_logps: PerToken) -> PerToken:
    """Compute d²/2: biased, small variance; on-policy its gradient is the gradient of the KL."""
    d = ref_logps - logps
    estimate: PerToken = d.__array_namespace__().square(d) / 2
    return estimate


def k3(logps: PerToken, ref_logps: PerToken) -> PerToken:
    """Compute exp(d) − d − 1: unbiased, never negative."""
    d = ref_logps - logps
    xp = d.__array_namespace__()
    d = xp.minimum(d, MAX_EXPONENT)
    estimate: PerToken = xp.expm1(d) - d
    return estimate


# --- aggregates, on the host


def sequence_mean(lengths: Int[np.ndarray, "B"], max_new_tokens: int) -> tuple[Float[np.ndarray, "B"], float]:
    """Average over completions the mean over their tokens (GRPO). A completion without tokens weighs 0 and counts in B.

    >>> sequence_mean(np.array([4, 0, 2]), 8)
    (array([0.25, 0.  , 0.5 ]), 3.0)
    """
    return np.where(lengths > 0, 1.0 / np.maximum(lengths, 1), 0.0), float(len(lengths))


def token_mean(lengths: Int[np.ndarray, "B"], max_new_tokens: int) -> tuple[Float[np.ndarray, "B"], float]:
    """Average over all tokens of the step (DAPO).

    >>> token_mean(np.array([4, 0, 2]), 8)
    (array([1., 0., 1.]), 6.0)
    """
    return np.where(lengths > 0, 1.0, 0.0), float(np.sum(lengths))


def constant(lengths: Int[np.ndarray, "B"], max_new_tokens: int) -> tuple[Float[np.ndarray, "B"], float]:
    """Divide the sum over all tokens by completions × max_new_tokens, the same for every step (Dr. GRPO).

    >>> constant(np.array([4, 0, 2]), 8)
    (array([1., 0., 1.]), 24.0)
    """
    return np.where(lengths > 0, 1.0, 0.0), float(len(lengths) * max_new_tokens)


# --- helpers


def _clamped_exp(x: PerToken) -> PerToken:
    return jnp.exp(jnp.minimum(x, MAX_EXPONENT))


def _clip_with_bound_grad(x: PerToken, low: float, high: float) -> PerToken:
    """Clip like `jnp.clip`, but with gradient 1 on a bound, not a half."""
    return jnp.where(x < low, low, jnp.where(x > high, high, x))


RATIOS: dict[str, Ratio] = {
    "token": token_ratio,
    "sequence": sequence_ratio,
    "sequence_token": sequence_token_ratio,
}
CORRECTION_LEVELS: dict[str, Ratio] = {
    "token": token_ratio,
    "sequence": whole_sequence_ratio,
    "geometric": sequence_ratio,
}
"""Ratio of trainer and sampler by the level of a correction."""
SURROGATES: dict[str, Surrogate] = {
    "clip": clip,
    "dual_clip": dual_clip,
    "cispo": cispo,
    "reinforce": reinforce,
    "sapo": sapo,
}
CLIP_METRICS = {"clip": clip_metrics, "dual_clip": dual_clip_metrics, "cispo": cispo_metrics}
"""Clip metrics by surrogate; surrogates that do not clip have none."""
KLS: dict[str, Callable[[Any, Any], Any]] = {"k1": k1, "k2": k2, "k3": k3}
"""KL estimators by name, for JAX and NumPy arrays."""
AGGREGATES: dict[str, Aggregate] = {
    "sequence_mean": sequence_mean,
    "token_mean": token_mean,
    "constant": constant,
}
