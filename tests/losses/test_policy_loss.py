"""The loss as a whole: its metrics, how it may be cut, packed and divided, and what it does where numbers get large."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as Spec

from covey.config.algorithms import PRESETS, Algorithm, Correction, algorithm_of
from covey.config.schema import GRPOConfig
from covey.losses.policy import AGGREGATES, CLIP_METRICS, RATIOS, SURROGATES, LossInputs, k3, policy_loss
from covey.losses.shaping import adapt_beta
from covey.packing.rows import pack, scatter_to_rows, split_micro_batches, unpack
from covey.train.trainer import _metrics
from covey.types import Mean

BASE = algorithm_of(GRPOConfig("grpo"))


def one(x: float) -> jax.Array:
    return jnp.full((1, 1), x, jnp.float32)


by_gradient = jax.jit(jax.value_and_grad(policy_loss, argnums=1, has_aux=True), static_argnums=0)


def single(x: Algorithm, logp: float, **fields: float) -> tuple[float, float, dict[str, Any]]:
    """Loss, gradient and metrics of one sample of one token with weight 1."""
    given = {"advantage": 1.0, "weight": 1.0, "rollout_logps": logp, "beta": x.beta} | fields
    inputs = LossInputs(**{name: one(value) for name, value in given.items()})
    segment_ids = jnp.ones((1, 1), jnp.int32)
    (value, metric_sums), grad = by_gradient(x, one(logp), one(2.0), segment_ids, inputs)
    return float(value), float(grad[0, 0]), metric_sums


def finished(metric_sums: dict[str, Any]) -> dict[str, float]:
    return {n: s.value if isinstance(s, tuple) else float(s) for n, s in metric_sums.items()}


def laid(
    groups_of: Callable, lengths: list[int], x: Algorithm = BASE, packing: str = "groups"
) -> tuple[np.ndarray, np.ndarray, np.ndarray, LossInputs]:
    """Log-probs, entropies, owners and inputs of random samples, as `pack` lays them."""
    rng = np.random.default_rng(0)
    logps = [rng.normal(size=n) - 3 for n in lengths]
    near = lambda scale: [v + rng.normal(size=len(v), scale=scale) for v in logps]  # noqa: E731
    old, ref, sampled = near(0.3), near(0.5), near(0.2)
    rows = pack(groups_of([(3, lengths)]), 64, packing=packing)  # type: ignore[arg-type]
    inputs = LossInputs(
        advantage=scatter_to_rows(rows, list(map(np.full, lengths, rng.normal(size=len(lengths))))),
        weight=scatter_to_rows(rows, list(map(np.full, lengths, AGGREGATES[x.aggregate](np.array(lengths), 64)[0]))),
        rollout_logps=scatter_to_rows(rows, sampled),
        beta=np.full((len(rows.tokens), 1), 0.04, np.float32),
        old_logps=scatter_to_rows(rows, old),
        ref_logps=scatter_to_rows(rows, ref),
    )
    return scatter_to_rows(rows, logps), np.abs(scatter_to_rows(rows, near(1.0))), rows.segment_ids, inputs


@pytest.mark.slow
def test_shares_by_hand(groups_of: Callable) -> None:
    """Two samples of 1 and 2 tokens: every metric is the mean over samples of the mean over tokens."""
    rows = pack(groups_of([(3, [1, 2])]), 64)
    row = lambda *values: scatter_to_rows(rows, [np.array(values[:1]), np.array(values[1:])])  # noqa: E731
    inputs = LossInputs(
        advantage=row(1.0, -2.0, -2.0),
        weight=row(1.0, 0.5, 0.5),
        rollout_logps=row(-1.25, -2.0, -3.5),
        beta=np.full((1, 1), 0.04, np.float32),
        old_logps=row(-1.5, -2.0, -2.0),  # ratios e^0.5, then 1 and e^-1
        ref_logps=row(-1.0, -2.0, -2.0),  # d = 0, then 0 and 1
    )
    x = replace(BASE, epsilon_high=0.3, entropy_bonus=0.5)
    loss, metric_sums = policy_loss(x, row(-1.0, -2.0, -3.0), row(3.0, 1.0, 2.0), rows.segment_ids, inputs)
    kl, surrogate = (np.e - 2) / 4, (-1.3 + (2.0 + 2 * 0.8) / 2) / 2
    want = {
        "kl": kl,
        "entropy": (3 + 1.5) / 2,
        "clip_ratio/high_mean": 1 / 2,
        "clip_ratio/low_mean": 1 / 4,
        "clip_ratio/region_mean": 3 / 4,
        # Of the log-probs before the update: later ones tell how far the policy has moved.
        "sampling/logp_difference/mean": (0.25 + 0.75) / 2,
        "sampling/logp_difference/max": 1.5,
        "sampling/importance_ratio/mean": (np.exp(-0.25) + (1 + np.exp(1.5)) / 2) / 2,
        "sampling/importance_ratio/min": np.exp(-0.25),
        "sampling/importance_ratio/max": np.exp(1.5),
    }
    assert finished(metric_sums) == pytest.approx(want, rel=1e-5)
    assert float(loss) / 2 == pytest.approx(surrogate + 0.04 * kl - 0.5 * 4.5 / 2, rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "ratio", "advantage", "low", "high", "region"),
    [
        ({}, 0.79, -1.0, 1, 0, 1),
        ({}, 0.79, 1.0, 0, 0, 0),
        ({}, 0.79, 0.5, 0, 0, 0),
        ({}, 0.79, 0.0, 0, 0, 0),
        ({}, 0.81, -1.0, 0, 0, 0),
        ({}, 1.19, 1.0, 0, 0, 0),
        ({}, 1.21, 1.0, 0, 1, 1),
        ({}, 1.21, -1.0, 0, 0, 0),
        ({}, 9.0, 0.0, 0, 0, 0),
        ({"delta": 2.0}, 2.1, -1.0, 0, 0, 1),
        ({"delta": 2.0}, 1.9, -1.0, 0, 0, 0),
        ({"delta": 2.0}, 2.1, 0.0, 0, 0, 0),
        ({"surrogate": "dual_clip"}, 3.1, -1.0, 0, 0, 1),
        ({"surrogate": "dual_clip"}, 2.9, -1.0, 0, 0, 0),
        ({"surrogate": "dual_clip"}, 3.1, 0.0, 0, 0, 0),
        ({"surrogate": "dual_clip"}, 0.79, -1.0, 1, 0, 1),
        ({"surrogate": "cispo"}, 5.1, -1.0, 0, 1, 1),
        ({"surrogate": "cispo"}, 4.9, 1.0, 0, 0, 0),
        ({"ratio": "sequence"}, 1.21, 1.0, 0, 1, 1),
    ],
)
def test_clip_ratios_count_what_the_clip_stops(
    settings: dict, ratio: float, advantage: float, low: int, high: int, region: int
) -> None:
    _, grad, metric_sums = single(replace(BASE, **settings), 0.0, advantage=advantage, old_logps=-np.log(ratio))
    parts = {"low": low, "high": high, "region": region}
    assert {name: finished(metric_sums)[f"clip_ratio/{name}_mean"] for name in parts} == parts
    if settings.get("surrogate") != "cispo":
        assert (grad == 0) == bool(region or not advantage)


@pytest.mark.parametrize("surrogate", ["clip", "dual_clip"])
@pytest.mark.parametrize("delta", [1.1, 1.2, 1.5, None])
@pytest.mark.parametrize("c", [1.15, 3.0])
def test_region_mean_counts_the_tokens_without_a_gradient(surrogate: str, delta: float | None, c: float) -> None:
    """For any order of δ, c and 1 + ε, against the slope of the formula in float64."""
    x = replace(BASE, surrogate=surrogate, delta=delta, dual_clip=c)
    ratios = np.repeat([0.5, 0.9, 1.05, 1.12, 1.18, 1.3, 1.7, 4.0], 2)
    advantages = np.tile([1.0, -1.0], len(ratios) // 2)

    def loss(w: np.ndarray) -> np.ndarray:
        plain = -np.minimum(np.minimum(w, delta or np.inf) * advantages, np.clip(w, 0.8, 1.2) * advantages)
        bounded = np.where(advantages < 0, np.minimum(plain, -c * advantages), plain)
        return plain if surrogate == "clip" else bounded

    slope = (loss(ratios + 1e-6) - loss(ratios - 1e-6)) / 2e-6
    counted = CLIP_METRICS[surrogate](*map(jnp.asarray, (ratios, advantages)), x)["clip_ratio/region_mean"]
    assert np.asarray(counted).tolist() == (slope == 0).tolist()


def test_surrogates_that_do_not_clip_say_nothing_of_it() -> None:
    for surrogate in SURROGATES:
        _, _, metric_sums = single(replace(BASE, surrogate=surrogate), -1.0)
        assert ("clip_ratio/region_mean" in metric_sums) == (surrogate in CLIP_METRICS)


def test_a_surrogate_of_ones_own(groups_of: Callable) -> None:
    """It gets ratio, log-probs, advantages and the algorithm. What it cuts is not known: there is no clip ratio."""
    batch = laid(groups_of, [2, 3])
    loss, metric_sums = policy_loss(
        BASE, *batch, surrogate=lambda ratio, logps, advantage, x: ratio + x.epsilon - logps
    )
    logps, _, _, inputs = batch
    want = np.exp(logps - inputs.old_logps) + 0.2 - logps + inputs.beta * k3(logps, inputs.ref_logps)
    np.testing.assert_allclose(loss, np.sum(inputs.weight * want), rtol=1e-5)
    assert not [name for name in metric_sums if name.startswith("clip_ratio")]
    same, with_ratios = policy_loss(BASE, *batch, surrogate=None)
    assert float(policy_loss(BASE, *batch, surrogate=SURROGATES["clip"])[0]) == float(same)
    assert "clip_ratio/low_mean" in with_ratios


@pytest.mark.parametrize("name", [name for name in get_args(Correction) if name != "none"])
def test_corrections_of_samplers_that_are_far_off_stay_finite(name: str) -> None:
    for sampled, finite in ((-1e4, 0.0 if name.endswith("mask") else -2.0), (1e4, 0.0)):
        value, grad, metric_sums = single(replace(BASE, correction=name), -1.0, rollout_logps=sampled)
        assert (value, grad) == pytest.approx((finite, finite))
        assert all(np.isfinite(x) for x in finished(metric_sums).values())


@pytest.mark.slow
def test_metrics_have_no_gradient(groups_of: Callable) -> None:
    x = replace(BASE, correction="token_truncate", entropy_bonus=0.1)
    logps, entropy, segment_ids, inputs = laid(groups_of, [2, 3])
    metrics = lambda *of: sum(map(jnp.sum, jax.tree.leaves(policy_loss(x, *of, segment_ids, inputs)[1])))  # noqa: E731
    assert not any(np.asarray(g).any() for g in jax.grad(metrics, (0, 1))(logps, entropy))


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_losses_and_shares_of_parts_add_up(groups_of: Callable, name: str) -> None:
    """Parts are plain sums, the filled-up last one included, so a step may be cut anywhere between rows."""
    x = replace(algorithm_of(GRPOConfig(name)), correction="geometric_truncate", entropy_bonus=0.01)
    batch = laid(groups_of, [5, 0, 1, 20, 13, 40, 37, 30], x)
    evaluate = partial(policy_loss, x)
    whole, metric_sums = evaluate(*batch)
    assert len(batch[0]) == 3
    for size in (1, 2):
        parts = [evaluate(*part) for part in split_micro_batches(batch, size)]
        assert sum(float(loss) for loss, _ in parts) == pytest.approx(float(whole), rel=1e-5, abs=1e-6)
        for key, value in metric_sums.items():
            combine = {"min": min, "max": max}.get(key.rsplit("/")[-1], sum)
            together = jax.tree.map(lambda *xs: combine(map(float, xs)), *(s[key] for _, s in parts))  # noqa: B023
            np.testing.assert_allclose(together, value, rtol=1e-5, atol=1e-6, err_msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "gspo", "gspo_token", "cispo"])
def test_packing_and_meshes_change_nothing(groups_of: Callable, name: str) -> None:
    """Several samples a row on one device, and one a row divided over four: one loss, one gradient."""
    x = replace(algorithm_of(GRPOConfig(name)), correction="geometric_mask")
    step = jax.jit(jax.value_and_grad(partial(policy_loss, x), has_aux=True))
    lengths, results = [5, 9, 3, 20, 1, 7, 2, 4], []
    for packing, devices in (("groups", 1), ("dense", 4)):
        batch = laid(groups_of, lengths, x, packing)
        mesh = jax.make_mesh((devices,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
        placed = jax.device_put(batch, NamedSharding(mesh, Spec("fsdp")))
        (loss, _), grad = step(*placed)
        assert len(grad.devices()) == devices
        assert not np.asarray(grad)[batch[2] == 0].any()
        rows = pack(groups_of([(3, lengths)]), 64, packing=packing)  # type: ignore[arg-type]
        results.append((float(loss), np.concatenate(unpack(rows, np.asarray(grad), lengths))))
    (loss, grads), (divided, divided_grads) = results
    assert divided == pytest.approx(loss, rel=1e-5, abs=1e-6)
    np.testing.assert_allclose(divided_grads, grads, rtol=1e-5, atol=1e-7)


def test_equal_old_log_probs_give_the_same_loss_and_gradient(groups_of: Callable) -> None:
    """The first of several updates on a batch is the only update of a batch used once."""
    logps, entropy, segment_ids, inputs = laid(groups_of, [5, 9, 3, 20])
    step = jax.value_and_grad(lambda lp, inputs: policy_loss(BASE, lp, entropy, segment_ids, inputs)[0])
    value, grad = step(jnp.asarray(logps), inputs._replace(old_logps=None))
    again, grad_again = step(jnp.asarray(logps), inputs._replace(old_logps=logps))
    assert float(value) == float(again)
    np.testing.assert_array_equal(grad, grad_again)


def test_the_kl_outside_the_loss_is_reported_and_not_followed(groups_of: Callable) -> None:
    """With β = 0, and with the KL in the reward, whatever β."""
    logps, entropy, segment_ids, inputs = laid(groups_of, [5, 9])
    step = lambda x, i: jax.value_and_grad(partial(policy_loss, x), has_aux=True)(logps, entropy, segment_ids, i)  # noqa: E731
    (plain, metric_sums), plain_grad = step(BASE, inputs._replace(ref_logps=None))
    assert "kl" not in metric_sums
    for x, beta in ((BASE, 0.0), (replace(BASE, kl_in="reward"), 0.5)):
        (value, metric_sums), grad = step(x, inputs._replace(beta=np.full((1, 1), beta, np.float32)))
        assert float(value) == float(plain)
        np.testing.assert_array_equal(grad, plain_grad)
        assert finished(metric_sums)["kl"] > 0.01


def test_a_batch_of_padding_is_nothing(groups_of: Callable) -> None:
    """No loss, no gradient, and no metric but NaN, whatever the model says at padding."""
    logps, entropy, segment_ids, inputs = laid(groups_of, [4])
    inputs, segment_ids = jax.tree.map(np.zeros_like, (inputs, segment_ids))
    for name in PRESETS:
        step = jax.value_and_grad(partial(policy_loss, algorithm_of(GRPOConfig(name))), (0, 1), has_aux=True)
        (value, metric_sums), grads = step(logps - 500, entropy, segment_ids, inputs)
        assert float(value) == 0
        assert not any(np.asarray(g).any() for g in grads)
        assert all(tuple(map(float, s)) == (0, 0) for s in metric_sums.values() if isinstance(s, Mean))
        metrics = _metrics(metric_sums, 1.0)
        assert metrics.pop("loss") == 0
        assert {"entropy", "sampling/importance_ratio/min", "sampling/logp_difference/max"} <= metrics.keys()
        assert np.isnan([*metrics.values()]).all()
        assert adapt_beta(0.1, kl=metrics.get("kl", np.nan), target=0.01, horizon=16, samples=16) == 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("ratio", RATIOS)
def test_far_apart_policies_stay_finite(name: str, ratio: str) -> None:
    """A ratio of e^1000 is beyond every clip: a large number and no gradient, never inf·0."""
    x = replace(
        algorithm_of(GRPOConfig(name)),
        ratio=ratio,
        kl="k3",
        kl_in="loss",
        correction="token_truncate",
        entropy_bonus=0.1,
    )
    points = ((-1e3, 0.0, 0.0), (0.0, -1e3, -1e3), (-90.0, -90.0, 0.0), (-1e30, 0.0, -1e30))
    cases = [(*point, advantage) for point in points for advantage in (-3.0, 0.0, 1e-6, 2.0)]
    logps, old, ref, advantages = np.float32(cases).T[..., None]  # a sample in each row
    ones = np.ones_like(logps)
    inputs = LossInputs(advantages, ones, old, x.beta * ones, old, ref)
    step = jax.value_and_grad(partial(policy_loss, x), has_aux=True)
    (value, metric_sums), grad = step(logps, ones, ones.astype(np.int32), inputs)
    assert np.isfinite(grad).all()
    assert np.isfinite([float(value), *finished(metric_sums).values()]).all()
