"""The GRPO step: each behaviour by its name, with its numbers."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from covey import (
    build_positions_from_mask,
    compute_advantages,
    get_per_token_logps,
    make_causal_attn_mask,
    pad_to_length,
)
from covey.config.algorithms import Algorithm, algorithm_of
from covey.config.schema import GRPOConfig
from covey.errors import RewardError
from covey.losses.policy import AGGREGATES, KLS, LossInputs, policy_loss
from covey.rl.grpo import GRPOLearner
from covey.types import Group

GRPO = algorithm_of(GRPOConfig(beta=0.04))


# Sampling and scoring


def test_for_each_prompt_g_completions_are_sampled(played: Callable) -> None:
    (record,) = played(prompts=3, samples=4).train(3).records
    assert [group.prompt for group in record.groups] == ["p0", "p1", "p2"]
    assert [len(group.completions) for group in record.groups] == [4, 4, 4]


def half(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    return [0.5] * len(completions)


def number(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    """`says 3` is worth 3."""
    return [float(text.split()[1]) for text in completions]


@pytest.mark.parametrize(("weights", "totals"), [(None, [0.5, 1.5, 2.5]), ((2.0, 0.1), [1.0, 1.1, 1.2])])
def test_the_total_reward_is_the_sum_of_all_functions_by_weights_of_1(
    played: Callable, weights: Any, totals: list[float]
) -> None:
    (record,) = played(prompts=2, samples=3, reward_weights=weights).train(2, [half, number]).records
    for group in record.groups:
        np.testing.assert_allclose(group.rewards, totals)
        assert group.rewards_by_function["half"].tolist() == [0.5] * 3
        assert group.rewards_by_function["number"].tolist() == [0.0, 1.0, 2.0]


def test_reward_functions_are_called_with_prompts_completions_and_columns(played: Callable) -> None:
    called: list[dict[str, Any]] = []

    def watched(**given: Any) -> list[float]:
        called.append(given)
        return [0.0, 1.0] * 2

    played(prompts=2, samples=2).train(2, watched)
    (given,) = called
    assert given["prompts"] == ["p0", "p0", "p1", "p1"]
    assert given["completions"] == ["says 0", "says 1"] * 2
    assert given["answer"] == ["0", "0", "1", "1"]


@pytest.mark.parametrize("returned", [[1.0], [1.0] * 5, 1.0, [1.0, 1.0, 1.0, float("nan")]])
def test_reward_functions_return_one_float_a_completion(played: Callable, returned: Any) -> None:
    def wrong(prompts: Sequence[str], completions: Sequence[str]) -> Any:
        return returned

    with pytest.raises(RewardError, match="'wrong'"):
        played(prompts=2, samples=2).train(2, wrong)


def test_the_names_users_know(played: Callable) -> None:
    config = GRPOConfig(beta=0.08, num_generations=4)
    assert (algorithm_of(config).beta, config.num_generations) == (0.08, 4)
    assert 0.02 <= algorithm_of(GRPOConfig()).beta <= 0.08
    assert GRPOLearner(rl_cluster=played(), reward_fns=half, grpo_config=config).reward_fns == [half]


def test_reward_funcs_is_a_name_users_know_too(played: Callable) -> None:
    assert GRPOLearner(rl_cluster=played(), reward_funcs=[half, number]).reward_fns == [half, number]


# The advantage


def test_the_advantage_uses_bessel_and_1e_4(played: Callable) -> None:
    (record,) = played(prompts=2, samples=4).train(2).records
    for group in record.groups:
        r = np.asarray(group.rewards)
        deviation = np.sqrt(((r - r.mean()) ** 2).sum() / 3)
        np.testing.assert_allclose(group.advantages, (r - r.mean()) / (deviation + 1e-4), rtol=1e-6)
        assert deviation > 0.5
    np.testing.assert_allclose(
        compute_advantages(np.array([1.0, 0.0]), 2), [0.5 / (0.5**0.5 + 1e-4)] * np.array([1, -1])
    )


def test_the_advantage_stands_at_each_token_of_its_sample(played: Callable) -> None:
    cluster = played(prompts=2, samples=3).train(2)
    ((batch,),) = cluster.updates
    advantages = np.concatenate([group.advantages for group in cluster.records[0].groups])
    for number, place, advantage in zip(
        *np.moveaxis(batch.rows.scatter_index, -1, 0), batch.inputs.advantage, strict=True
    ):
        np.testing.assert_array_equal(advantage[number >= 0], advantages[number[number >= 0]])
        assert not advantage[place < 0].any()


# The loss


def inputs(lengths: Sequence[int], seed: int = 0, **changes: Any) -> tuple[jax.Array, jax.Array, LossInputs]:
    """Samples of these lengths, one a row: policy log-probs, segment_ids, and what the loss needs beside them."""
    rng, width = np.random.default_rng(seed), 8
    mask = np.arange(width) < np.array(lengths)[:, None]
    draw = lambda: np.where(mask, rng.normal(size=mask.shape) - 2, 0).astype(np.float32)  # noqa: E731
    weights, _ = AGGREGATES["sequence_mean"](np.array(lengths), width)
    given = LossInputs(
        advantage=np.where(mask, rng.normal(size=(len(lengths), 1)), 0).astype(np.float32),
        weight=np.where(mask, weights[:, None], 0).astype(np.float32),
        rollout_logps=draw(),
        beta=np.full((len(lengths), 1), 0.04, np.float32),
        ref_logps=draw(),
    )
    return jnp.asarray(draw()), jnp.asarray(mask.astype(np.int32)), given._replace(**changes)


def loss(logps: jax.Array, segment_ids: jax.Array, given: LossInputs, algorithm: Algorithm = GRPO) -> tuple[Any, Any]:
    """The sum, with its metrics."""
    return policy_loss(algorithm, logps, jnp.zeros_like(logps), segment_ids, given)


def gradient(logps: jax.Array, segment_ids: jax.Array, given: LossInputs) -> np.ndarray:
    return np.asarray(jax.grad(lambda x: loss(x, segment_ids, given)[0])(logps))


def test_the_kl_is_exp_d_minus_d_minus_1() -> None:
    logps, segment_ids, given = inputs([3, 2])
    d = np.asarray(given.ref_logps, np.float64) - np.asarray(logps, np.float64)
    want = np.where(segment_ids, np.exp(d) - d - 1, 0)
    kl = loss(logps, segment_ids, given)[1]["kl"]
    assert float(kl.total / kl.count) == pytest.approx((want * given.weight).sum() / given.weight.sum(), rel=1e-5)
    assert GRPO.kl == "k3"


@given(st.floats(-50, 0, width=32), st.floats(-50, 0, width=32))
def test_the_kl_is_never_negative(logp: float, ref: float) -> None:
    assert float(KLS["k3"](jnp.float32(logp), jnp.float32(ref))) >= 0
    assert float(KLS["k3"](jnp.float32(logp), jnp.float32(logp))) == 0


@pytest.mark.parametrize(("updates", "stored"), [(1, False), (2, True)])
def test_with_one_update_per_batch_there_is_no_stored_old_log_prob(
    played: Callable, updates: int, stored: bool
) -> None:
    cluster = played(prompts=2, updates=updates).train(2)
    assert bool(cluster.samples("old_logps")) == stored
    assert all((batch.inputs.old_logps is not None) == stored for update in cluster.updates for batch in update)


@pytest.mark.slow
def test_with_one_update_the_ratio_is_1_and_the_gradient_is_the_policy_gradient() -> None:
    logps, segment_ids, given = inputs([4, 2, 1], ref_logps=None)
    value, metrics = loss(logps, segment_ids, given)
    assert float(value) == pytest.approx(-(given.weight * given.advantage).sum(), rel=1e-5)
    assert float(metrics["clip_ratio/region_mean"].total) == 0
    np.testing.assert_allclose(gradient(logps, segment_ids, given), -given.weight * given.advantage, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize("ratio", [0.5, 0.79, 0.81, 1.0, 1.19, 1.21, 3.0])
def test_the_ratio_is_clipped_to_within_epsilon(advantage: float, ratio: float) -> None:
    """−min(w·A, clip(w, 1 − 0.2, 1 + 0.2)·A), and no gradient where the clip is the smaller."""
    old = np.array([[-3.0]], np.float32)
    logps, one = jnp.asarray(old + np.float32(np.log(ratio))), np.ones((1, 1), np.float32)
    given = LossInputs(one * np.float32(advantage), one, old, one, old_logps=old)
    bounded = min(max(ratio, 0.8), 1.2)
    want = -min(ratio * advantage, bounded * advantage)
    assert float(loss(logps, jnp.ones((1, 1), jnp.int32), given)[0]) == pytest.approx(want, rel=1e-5)
    cut = bounded * advantage < ratio * advantage
    slope = 0.0 if cut else -ratio * advantage
    assert float(gradient(logps, jnp.ones((1, 1), jnp.int32), given)[0, 0]) == pytest.approx(slope, rel=1e-5)


@pytest.mark.parametrize("beta", [0.02, 0.08])
def test_the_loss_of_a_token_is_minus_surrogate_minus_beta_kl(beta: float) -> None:
    logps, segment_ids, given = inputs([3, 5])
    given = given._replace(beta=np.full((2, 1), beta, np.float32))
    without, metrics = loss(logps, segment_ids, given)[0], loss(logps, segment_ids, given)[1]
    plain = loss(logps, segment_ids, given._replace(ref_logps=None))[0]
    assert float(without) == pytest.approx(float(plain) + beta * float(metrics["kl"].total), rel=1e-5)
    assert beta * float(metrics["kl"].total) > 1e-3


def test_the_mean_is_over_valid_tokens_then_over_samples() -> None:
    """Three samples of 1, 2 and 4 tokens weigh the same, however long they are."""
    lengths = np.array([1, 2, 4])
    weights, denominator = AGGREGATES[GRPO.aggregate](lengths, 8)
    per_token = [np.array([5.0]), np.array([1.0, 3.0]), np.array([2.0, 2.0, 0.0, 8.0])]
    total = sum(w * x.sum() for w, x in zip(weights, per_token, strict=True))
    assert total / denominator == pytest.approx((5 + 2 + 3) / 3)


def test_a_sample_without_tokens_contributes_0_and_never_0_over_0() -> None:
    """It counts among the samples: beside it the other weighs a half."""
    weights, denominator = AGGREGATES[GRPO.aggregate](np.array([4, 0]), 8)
    assert (weights.tolist(), denominator) == ([0.25, 0.0], 2.0)
    logps, segment_ids, given = inputs([4, 0])
    assert np.isfinite(float(loss(logps, segment_ids, given)[0]))
    assert not gradient(logps, segment_ids, given)[1].any()
    nothing = given._replace(weight=np.zeros_like(given.weight))
    assert float(loss(logps, segment_ids, nothing)[0]) == 0.0
    assert not gradient(logps, segment_ids, nothing).any()


def test_samples_that_are_masked_whole_contribute_0_to_a_step(played: Callable) -> None:
    """Every second completion was cut off: masked, it has no weight and still counts in the mean."""
    ((batch,),) = played(prompts=2, samples=4, mask_truncated=True).train(2).updates
    number = batch.rows.scatter_index[..., 0]
    assert not batch.inputs.weight[number % 2 == 1].any()
    assert (batch.inputs.weight[(number >= 0) & (number % 2 == 0)] > 0).all()
    assert batch.denominator == 8.0


@pytest.mark.slow
def test_a_step_moves_the_weights_by_the_gradient_of_that_loss(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way, against padded samples and the formulas: the first update, with ratio 1, and the second."""
    trainer = bench.fresh().trainer
    states: list[Any] = []
    update = trainer.update
    monkeypatch.setattr(trainer, "update", lambda parts: states.append(np_tree(trainer.params)) or update(parts))
    groups = bench.train()[0].groups
    start, second, third = states[:3]
    step = Padded(trainer.graph, groups, temperature=0.7)
    before = step.logps(start)
    for at, after in ((start, second), (second, third)):
        gradient = step.gradient(at, before)
        moved = jax.tree.map(lambda a, b: (a - b) / 0.3, at, after)
        for one, other in zip(jax.tree.leaves(moved), jax.tree.leaves(gradient), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)
    assert np.abs(step.logps(second) - before).max() > 0.01, "the second update is not on-policy"


def np_tree(tree: Any) -> Any:
    return jax.tree.map(np.array, tree)


class Padded:
    """A step's samples as padded arrays, prompts on the left, and GRPO's loss on them as an equation."""

    def __init__(self, graph: Any, groups: Sequence[Group], temperature: float):
        samples = [(g.prompt_tokens, c.tokens) for g in groups for c in g.completions]
        left, right = max(len(p) for p, _ in samples), max(len(c) for _, c in samples)
        full = lambda x, n, side: pad_to_length(jnp.asarray(x), n, pad_value=0, left=side)  # noqa: E731
        ids = jnp.stack([jnp.concatenate([full(p, left, True), full(c, right, False)]) for p, c in samples])
        ones = [(np.ones(len(p)), np.ones(len(c))) for p, c in samples]
        mask = jnp.stack([jnp.concatenate([full(p, left, True), full(c, right, False)]) for p, c in ones])
        self.valid = mask[:, left:]
        self.advantage = np.concatenate([g.advantages for g in groups])[:, None]
        positions, causal = build_positions_from_mask(mask), make_causal_attn_mask(mask)
        score = lambda params: get_per_token_logps(  # noqa: E731
            nnx.merge(graph, params), ids, positions, causal, right, temperature
        )
        self.logps = jax.jit(score)
        self.gradient = jax.jit(jax.grad(lambda params, old: self._loss(score(params), old)))

    def _loss(self, logps: jax.Array, old: jax.Array) -> jax.Array:
        """Before the step's first update actor and reference are the same, so `old` is the reference's too."""
        ratio, d = jnp.exp(logps - old), old - logps
        surrogate = jnp.minimum(ratio * self.advantage, jnp.clip(ratio, 0.8, 1.2) * self.advantage)
        per_token = -(surrogate - 0.04 * (jnp.exp(d) - d - 1))
        return ((per_token * self.valid).sum(1) / jnp.maximum(self.valid.sum(1), 1)).mean()
