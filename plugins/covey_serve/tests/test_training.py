"""Losses, gradients and AdamW of the training API against float64."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from covey.config.algorithms import GRPOConfig, algorithm_of
from covey.config.schema import LoRAConfig
from covey.losses.policy import LossInputs
from covey.models.attention import causal_attention
from covey.models.config import ModelConfig
from covey.models.decoder import Decoder
from covey.models.lora import split_trainable, with_lora
from covey.packing.rows import pack, scatter_to_rows
from covey.rl.batches import RowBatch, policy_loss_fn
from covey.sampling.logits import SamplingParams
from covey.train.programs import UpdatePrograms
from covey.types import Completion, FinishReason, Group
from covey_serve.errors import ApiError
from covey_serve.examples import BY_TOKEN, COLUMNS, Example, make_batch, make_trees
from covey_serve.training import SETTINGS, Trainer, per_token_loss

ADAM = {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.1, "grad_clip_norm": 0.5}


def loss_in_numpy(name: str, logps: np.ndarray, old: np.ndarray, adv: np.ndarray, weight: np.ndarray, s: Any) -> float:
    """The documentation's formulas for one datum, in float64."""
    ratio = np.exp(logps - old)
    if name == "gspo":
        used = adv != 0
        ratio = np.full_like(ratio, np.exp((logps - old)[used].mean() if used.any() else 0.0))
    clipped = np.clip(ratio, s.get("clip_low_threshold", 0), s.get("clip_high_threshold", 9))
    each = {
        "cross_entropy": -weight * logps,
        "importance_sampling": -ratio * adv,
        "ppo": -np.minimum(ratio * adv, clipped * adv),
        "gspo": -np.minimum(ratio * adv, clipped * adv),
        "cispo": -clipped * adv * logps,
        "dro": -(adv * logps - s.get("beta", 0) / 2 * (logps - old) ** 2),
    }
    return float(each[name].sum())


def examples(sizes: list[int], seed: int = 0) -> list[Example]:
    rng = np.random.default_rng(seed)
    made = []
    for n in sizes:
        tokens = rng.integers(0, 300, n + 1)
        inputs = {
            "target_tokens": tokens[1:],
            "weights": rng.normal(size=n).astype(np.float32),
            "advantages": np.where(np.arange(n) < 1, 0, rng.normal(size=n)).astype(np.float32),
            "logprobs": -5 + rng.normal(size=n).astype(np.float32),
        }
        made.append(Example(tokens[:-1].astype(np.int32), inputs))
    return made


@pytest.fixture(scope="module")
def trainer(request: pytest.FixtureRequest) -> Trainer:
    return Trainer(_base())


def _base() -> Any:
    config = ModelConfig(
        vocab_size=300, hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8,
        tie_embeddings=True,
    )  # fmt: skip
    return Decoder(config, rngs=nnx.Rngs(0))


def logps_of(trainer: Trainer, trainable: Any, one: Example) -> jax.Array:
    """Log-probs of the targets by a plain forward pass of the whole model."""
    graph, _, frozen = split_trainable(with_lora(trainer._base, LoRAConfig(rank=2)))
    tokens, targets = jnp.asarray(one.tokens)[None], jnp.asarray(one.inputs["target_tokens"])
    return plain_logps(graph, trainable, frozen, tokens, targets)


@partial(jax.jit, static_argnums=0)
def plain_logps(graph: Any, trainable: Any, frozen: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    model = nnx.merge(graph, trainable, frozen)
    positions = jnp.arange(tokens.shape[1])[None]
    logits = model.logits(model(tokens, positions, causal_attention(jnp.ones_like(tokens, bool), positions))[0])
    return jax.nn.log_softmax(logits[0])[jnp.arange(tokens.shape[1]), targets]


@pytest.mark.parametrize("name", SETTINGS)
def test_losses_are_the_formulas(name: str, trainer: Trainer) -> None:
    data, settings = examples([5, 5, 1]), SETTINGS[name]
    model = trainer.create(2, seed=3)
    logps, total = trainer.gradients(model, name, data, settings, backward=False)
    assert model.sums is None
    want = 0.0
    for one, found in zip(data, logps, strict=True):
        np.testing.assert_allclose(found, logps_of(trainer, model.trainable, one), atol=2e-5)
        columns = [np.float64(one.inputs[key]) for key in ("logprobs", "advantages", "weights")]
        want += loss_in_numpy(name, np.float64(found), *columns, settings)
    assert total == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("name", SETTINGS)
def test_slopes_of_losses_are_those_of_the_formulas(name: str) -> None:
    """Central differences in float64 of the formula, but of cispo, whose ratio has no gradient."""
    (one,), settings = examples([7], seed=2), SETTINGS[name]
    old, adv, weight = (np.float64(one.inputs[key])[None] for key in ("logprobs", "advantages", "weights"))
    logps = old + np.linspace(-0.6, 0.6, 7)[None]
    segments = np.ones((1, 7), int)
    batch: Any = SimpleNamespace(
        rows=SimpleNamespace(segment_ids=segments), weight=weight, advantage=adv, old=old, mask=adv != 0,
        low=settings.get("clip_low_threshold", 1.0), high=settings.get("clip_high_threshold", 1.0),
        beta=settings.get("beta", 1.0),
    )  # fmt: skip
    grads = np.asarray(jax.grad(lambda x: per_token_loss(name, x, batch).sum())(jnp.asarray(logps)))[0]
    for place in range(7):
        step = np.eye(7)[place] * 1e-5
        if name == "cispo":
            want = -np.clip(np.exp(logps - old), 0.8, 1.2)[0, place] * adv[0, place]
        else:
            up, down = (loss_in_numpy(name, logps[0] + d, old[0], adv[0], weight[0], settings) for d in (step, -step))
            want = (up - down) / 2e-5
        assert grads[place] == pytest.approx(want, rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_requests_add_up_to_one_and_adamw_is_its_formula(trainer: Trainer) -> None:
    data = examples([5, 5, 5, 5])
    model, parts = trainer.create(2, seed=3), trainer.create(2, seed=3)
    trainer.gradients(model, "cross_entropy", data, {}, backward=True)
    for part in (data[:2], data[2:]):
        trainer.gradients(parts, "cross_entropy", part, {}, backward=True)

    def loss(trainable: Any) -> Any:
        return sum(-(logps_of(trainer, trainable, one) * one.inputs["weights"]).sum() for one in data)

    grads = [np.float64(x) for x in jax.tree.leaves(jax.grad(loss)(model.trainable))]
    norm = np.sqrt(sum((g**2).sum() for g in grads))
    before = [np.float64(x) for x in jax.tree.leaves(model.trainable)]
    assert trainer.step(model, ADAM) == pytest.approx(norm, rel=1e-4)
    assert trainer.step(parts, ADAM) == pytest.approx(norm, rel=1e-4)
    for g, old, new, other in zip(
        grads, before, *(map(np.float64, jax.tree.leaves(m.trainable)) for m in (model, parts)), strict=True
    ):
        clipped = g * 0.5 / norm
        # The first step of AdamW: both moments are corrected to the gradient and its square.
        moved = np.where(np.abs(clipped) > 1e-6, np.sign(clipped), np.nan)
        want = old - 0.01 * (moved + 0.1 * old)
        kept = ~np.isnan(want)
        np.testing.assert_allclose(new[kept], want[kept], atol=1e-4)
        np.testing.assert_allclose(other[kept], new[kept], atol=1e-4)


def test_a_step_without_gradients_is_refused(trainer: Trainer) -> None:
    with pytest.raises(ApiError, match="there are no gradients"):
        trainer.step(trainer.create(2, seed=0), ADAM)


def test_a_step_that_is_not_finite_changes_nothing(trainer: Trainer) -> None:
    model = trainer.create(2, seed=0)
    (one,) = examples([4])
    trainer.gradients(
        model, "cross_entropy", [Example(one.tokens, one.inputs | {"weights": np.full(4, np.nan)})], {}, True
    )
    before = jax.tree.leaves(model.trainable)
    with pytest.raises(ApiError, match="the norm of the gradients is nan"):
        trainer.step(model, ADAM)
    assert all(x is y for x, y in zip(before, jax.tree.leaves(model.trainable), strict=True))
    assert model.sums is None


def test_several_targets_of_a_token_are_that_many_losses(trainer: Trainer) -> None:
    """As soft targets of a teacher come: [n, k] with a weight for each."""
    data, rng = examples([4, 2]), np.random.default_rng(1)
    wide = []
    for one in data:
        targets, weights = rng.integers(0, 300, (len(one.tokens), 3)), rng.random((len(one.tokens), 3), np.float32)
        wide.append(Example(one.tokens, {"target_tokens": targets, "weights": weights}))
    model, other = trainer.create(2, seed=3), trainer.create(2, seed=3)
    logps, total = trainer.gradients(model, "cross_entropy", [wide[0], data[0], wide[1]], {}, backward=True)
    assert [one.shape for one in logps] == [(4, 3), (4,), (2, 3)]
    whole = trainer.gradients(other, "cross_entropy", data[:1], {}, backward=True)[1]
    for number, column in ((0, 0), (0, 1), (0, 2), (2, 0), (2, 1), (2, 2)):
        given = wide[number // 2]
        narrow = Example(given.tokens, {key: value[:, column] for key, value in given.inputs.items()})
        (own,), loss = trainer.gradients(other, "cross_entropy", [narrow], {}, backward=True)
        np.testing.assert_allclose(logps[number][:, column], own, atol=1e-5)
        whole += loss
    assert total == pytest.approx(whole, rel=1e-5)
    assert trainer.step(model, ADAM) == pytest.approx(trainer.step(other, ADAM), rel=1e-5)


@pytest.mark.slow
def test_rank_0_trains_all_weights_and_leaves_those_of_the_base(trainer: Trainer) -> None:
    data, model = examples([5, 3]), trainer.create(0, seed=0)
    graph, params, rest = split_trainable(trainer._base)
    before = jax.tree.map(np.array, params)

    def loss(trainable: Any) -> Any:
        logps = [
            plain_logps(graph, trainable, rest, jnp.asarray(one.tokens)[None], jnp.asarray(one.inputs["target_tokens"]))
            for one in data
        ]
        return sum(-(own * one.inputs["weights"]).sum() for own, one in zip(logps, data, strict=True))

    norm = np.sqrt(sum(float((np.float64(g) ** 2).sum()) for g in jax.tree.leaves(jax.grad(loss)(params))))
    trainer.gradients(model, "cross_entropy", data, {}, backward=True)
    assert trainer.step(model, ADAM) == pytest.approx(norm, rel=1e-4)
    moved = jax.tree.map(lambda x, y: bool((x != y).any()), before, model.trainable)
    assert all(jax.tree.leaves(moved))
    jax.tree.map(np.testing.assert_array_equal, before, split_trainable(trainer._base)[1])


@pytest.mark.parametrize("name", BY_TOKEN)
def test_samples_of_a_prompt_have_it_computed_once_and_the_same_gradients(name: str, trainer: Trainer) -> None:
    """Against the same samples, each with a row of its own; a fourth example begins otherwise."""
    prompt, data = examples([6], seed=5)[0], list[Example]()
    for n, seed in ((3, 1), (1, 2), (4, 3), (3, 4)):
        (own,) = examples([n], seed=seed)
        start = prompt.tokens[: 6 - (seed == 4)]
        tokens = np.concatenate([start, own.tokens]).astype(np.int32)
        zeros = np.zeros(len(start) - 1, np.float32)  # the first token of the sample is the target of the last one
        inputs = {key: np.concatenate([zeros, [0.7], np.abs(own.inputs[key]) + 0.5]) for key in COLUMNS}
        data.append(Example(tokens, inputs | {"target_tokens": np.append(tokens[1:], 7)}))
    trees = make_trees(name, data)
    assert [list(tree.examples) for tree in trees] == [[0, 1, 2], [3]]
    assert make_batch(name, data, {})[0].rows.scored.sum() == 9 + 2 + 5 + 8
    model, other = trainer.create(2, seed=3), trainer.create(2, seed=3)
    logps, total = trainer.gradients(model, name, data, SETTINGS[name], backward=True)
    parts = [trainer.gradients(other, name, [one], SETTINGS[name], backward=True) for one in data]
    for one, (own, _) in zip(logps, parts, strict=True):
        np.testing.assert_allclose(one, own[0], atol=1e-5)
    assert total == pytest.approx(sum(loss for _, loss in parts), rel=1e-5)
    assert trainer.step(model, ADAM) == pytest.approx(trainer.step(other, ADAM), rel=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), model.trainable, other.trainable)


def test_gradients_of_ppo_are_those_of_the_learner_on_the_same_samples(trainer: Trainer) -> None:
    """The learner has a prompt and its completions in a row, the client sends each sample with its prompt; what is
    left is rounding.
    """
    rng, prompt = np.random.default_rng(3), np.arange(20, 27, dtype=np.int32)
    sampled = [rng.integers(0, 300, n).astype(np.int32) for n in (3, 5, 1, 4)]
    old = [(-5.7 + 0.2 * rng.normal(size=len(one))).astype(np.float32) for one in sampled]
    values = (1.0, -1.0, 0.5, -0.5)
    advantages = [np.full(len(one), value, np.float32) for one, value in zip(sampled, values, strict=True)]

    completions = [Completion(one, logps, logps, FinishReason.STOP) for one, logps in zip(sampled, old, strict=True)]
    rows = pack([Group("", prompt, tuple(completions))])
    column = partial(scatter_to_rows, rows)
    weight, beta = rows.scored.astype(np.float32), np.zeros((1, 1), np.float32)
    inputs = LossInputs(column(advantages), weight, column(old), beta, column(old))
    loss_fn = policy_loss_fn(algorithm_of(GRPOConfig(beta=0.0, epsilon=0.2)), SamplingParams(1.0))
    learner = UpdatePrograms(with_lora(trainer._base, LoRAConfig(rank=2), seed=3), optax.identity(), loss_fn)
    model = trainer.create(2, seed=3)
    # B is 0 in new adapters, which would leave half of the gradients 0.
    model.trainable = jax.tree.map(lambda x: x + 0.05, model.trainable)
    frozen = split_trainable(trainer._base)[1]
    sums, _ = learner.accumulate(model.trainable, frozen, learner.zeros(model.trainable), RowBatch(rows, inputs), 0)
    want = learner.layout.as_trainable(sums)

    data = []
    for one, logps, advantage in zip(sampled, old, advantages, strict=True):
        tokens, zeros = np.concatenate([prompt, one]), np.zeros(len(prompt) - 1, np.float32)
        columns = {"logprobs": np.append(zeros, logps), "advantages": np.append(zeros, advantage)}
        data.append(Example(tokens[:-1], columns | {"target_tokens": tokens[1:]}))
    trainer.gradients(model, "ppo", data, SETTINGS["ppo"], backward=True)
    found = trainer.programs(2, "ppo").layout.as_trainable(model.sums)
    for ours, theirs in zip(jax.tree.leaves(want), jax.tree.leaves(found), strict=True):
        assert np.abs(theirs).max() > 0
        np.testing.assert_allclose(theirs, ours, rtol=2e-5, atol=2e-6 * float(np.abs(ours).max()))
