"""Every algorithm learns a task from random weights, and what steers it on the way does what it says."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from covey.config.algorithms import PRESETS, algorithm_of
from covey.config.metrics import RL, is_logged
from covey.config.schema import GRPOConfig, OptimizerConfig, RLTrainingConfig, RolloutConfig
from covey.data.loader import PromptLoader
from covey.errors import RecipeError
from covey.models.config import ModelConfig
from covey.models.decoder import Decoder
from covey.models.value_model import ValueModel, make_value_model
from covey.monitor.record import StepRecord
from covey.packing.rows import Rows, pack
from covey.parallel import flatten
from covey.rl.cluster import RLCluster
from covey.rl.grpo import GRPOLearner
from covey.rl.learner import Learner
from covey.rl.roles import ClusterConfig, Role
from covey.rl.scorers import RowScorer
from covey.text.tokenizer import Tokenizer
from covey.types import Group

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_programs")]

TINY = Path(__file__).parents[1] / "parity" / "golden" / "tiny-llama"
MODEL = ModelConfig(
    vocab_size=300, hidden_size=32, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=16,
    tie_embeddings=True,
)  # fmt: skip
STOPS, MIDDLE = range(40), range(100, 200)
"""So many stop tokens that answers of random weights end anywhere; the tokens to be written, a third of all."""
PROMPTS = [{"prompt": letter} for letter in "abcdefgh"]
P, G, STEPS = len(PROMPTS), 8, 16
WEIGHT = 8.0
"""Reward of an answer whose tokens are all right, so that the KL in the reward of rloo and ppo and dapo's penalty for
length, which stay as the presets have them, are no match for it.
"""
MARGIN = 0.4 * WEIGHT
"""How much the reward rises at least: mean of the last three steps less that of the first three."""


def middle(completion_ids: Sequence[Sequence[int]]) -> list[float]:
    """The weighted share of right tokens in an answer, its stop token left out; 0 for an answer without any."""
    return [WEIGHT * float(np.mean([t in MIDDLE for t in ids if t not in STOPS] or [0])) for ids in completion_ids]


class Run:
    """A learner on a tiny decoder, and the records of its steps.

    Args:
        steps: `max_steps`.
        reward: the reward model.
        settings: of the algorithm.
    """

    def __init__(self, *, steps: int = STEPS, reward: ValueModel | None = None, **settings: Any):
        optimizer = OptimizerConfig(learning_rate=4e-2, schedule="constant", warmup_ratio=0.0)
        training = RLTrainingConfig(
            max_steps=steps, prompts_per_step=P, actor_optimizer=optimizer, critic_optimizer=optimizer, row_length=64,
            max_tokens_per_micro_batch=64,
        )  # fmt: skip
        plain = Tokenizer.from_folder(TINY)
        self.cluster = RLCluster(
            actor=decoder(0),
            reward=reward,
            tokenizer=Tokenizer(plain.inner, eos_id=plain.eos_id, stop_ids=STOPS),
            cluster_config=ClusterConfig({}, training, RolloutConfig(max_new_tokens=12, slots=64)),
        )
        self.config = GRPOConfig(**{"num_generations": G, **settings})
        self.records: list[StepRecord] = []
        self.learner = self.another_learner(self.config)
        self.learner.prepare(steps)

    def another_learner(self, config: GRPOConfig) -> Learner:
        """On the same cluster, with the same observer."""
        others: Any = {"rl_cluster": self.cluster, "reward_fns": middle, "observers": [self.records.append]}
        critic = algorithm_of(GRPOConfig(config.algorithm)).needs_critic
        return (
            pytest.importorskip("covey_ppo.learner").PPOLearner(ppo_config=config, **others)
            if critic
            else GRPOLearner(grpo_config=config, **others)
        )

    def train(self, steps: int = STEPS) -> "Run":
        """So many steps more."""
        self.learner.train(PromptLoader(PROMPTS, P, shuffle=False, num_epochs=steps))
        return self

    def metric(self, name: str) -> np.ndarray:
        return np.array([record.metrics[name] for record in self.records])


def decoder(seed: int) -> Decoder:
    return Decoder(MODEL, rngs=nnx.Rngs(seed), remat=False)


def laid_out(groups: Sequence[Group]) -> tuple[Rows, list[int]]:
    return pack(groups, 64), [len(c.tokens) for g in groups for c in g.completions]


def log_probs(params: Any, groups: Sequence[Group]) -> np.ndarray:
    """Of all tokens of the groups, under a decoder with these weights."""
    return np.concatenate(RowScorer.of_logps(decoder(0), 1.0)(params, *laid_out(groups), size=4)[0])


ALIKE = ("bnpo", "gspo_token", "sapo")
"""Presets that learn as `grpo` or `gspo` do but for the loss, whose values and gradients are compared in `tests/losses`
with those of TRL and of float64.
"""


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in ALIKE])
def test_every_preset_learns(name: str) -> None:
    """From a share of a third to nearly all."""
    made = Run(algorithm=name).train()
    right = made.metric("rewards/middle/mean")
    assert STEPS - 3 <= len(right) <= STEPS  # what dapo puts in the place of equal groups comes out of these data
    assert right[-3:].mean() - right[:3].mean() > MARGIN, right.round(2)
    assert [one for one in made.records[0].metrics if not is_logged(one, RL, ["middle"])] == []
    assert made.metric("sampling/token_agreement").mean() > 0.999


# --- the reference


def test_a_kl_in_the_loss_holds_the_policy_back() -> None:
    far, near = (Run(beta=beta).train(8) for beta in (0.0, 2.0))
    distances = []
    for made in (far, near):
        groups = made.records[-1].groups
        d = log_probs(nnx.state(decoder(0)), groups) - log_probs(made.cluster.trainer.params, groups)
        distances.append(float(np.mean(np.expm1(d) - d)))
    assert distances[0] > 0.2
    assert distances[1] < distances[0] / 4
    assert near.metric("kl")[0] == pytest.approx(0.0, abs=1e-6)  # the policy is still the reference
    assert "kl" not in far.records[0].metrics


def test_an_adapted_beta_follows_the_kl() -> None:
    """Down while the policy is nearer to the reference than the target, up once it is farther, a fifth at most for a
    step of as many samples as the horizon has (Ziegler et al., 2019).
    """
    made = Run(beta=0.01, kl_target=0.05, kl_horizon=P * G).train(8)
    beta, kl = made.metric("beta"), made.metric("kl")
    factors = 1 + np.clip(kl / 0.05 - 1, -0.2, 0.2)
    np.testing.assert_allclose(beta[1:], beta[:-1] * factors[:-1])
    assert beta[0] == 0.01
    assert factors.min() == pytest.approx(0.8)
    assert factors.max() == pytest.approx(1.2)


def test_a_moving_reference_is_the_mixture() -> None:
    """reference ← α·actor + (1 − α)·reference every second update, and its log-probs are that decoder's."""
    made = Run(beta=0.04, reference_every_n_updates=2, reference_mixing=0.6)
    actors, references = [], []

    def remember(record: StepRecord) -> None:
        cluster = made.cluster
        actors.append(jax.tree.map(np.array, cluster.trainer.params))
        references.append(jax.tree.map(np.array, cluster.inference.params[Role.REFERENCE]))

    made.learner.observers.append(remember)
    made.train(4)
    want = nnx.state(decoder(0))
    for step, (actor, reference) in enumerate(zip(actors, references, strict=True), start=1):
        if step % 2 == 0:
            want = jax.tree.map(lambda a, r: np.float32(0.6) * a + np.float32(0.4) * r, actor, want)
        for name, x in flatten(want).items():
            np.testing.assert_allclose(flatten(reference)[name], x, rtol=1e-6, atol=1e-7, err_msg=name)
    groups = made.records[-1].groups
    moved, kept = log_probs(want, groups), log_probs(nnx.state(decoder(0)), groups)
    found = np.concatenate(made.cluster.get_ref_per_token_logps(*laid_out(groups)))
    np.testing.assert_allclose(found, moved, atol=1e-5)
    assert np.abs(moved - kept).max() > 0.1


# --- the loop


def test_a_reward_model_is_one_more_reward_function() -> None:
    """The last: its weight stands behind the functions'."""
    model = make_value_model(decoder(3))
    model.score[...] = jnp.asarray(np.random.default_rng(7).normal(size=32), jnp.float32)
    made = Run(reward=model, reward_weights=(1.0, 0.5)).train(1)
    (record,) = made.records
    for group in record.groups:
        parts = group.rewards_by_function
        assert list(parts) == ["middle", "reward_model"]
        np.testing.assert_allclose(group.rewards, parts["middle"] + 0.5 * parts["reward_model"])
        answers = [c.tokens.tolist() for c in group.completions]
        scores = made.cluster.get_rewards([group.prompt_tokens.tolist()] * G, answers)
        # Both are rounded to float32 in two layers of sums of up to 64 terms.
        size = max(1.0, float(np.abs(scores).max()))
        np.testing.assert_allclose(parts["reward_model"], scores, rtol=0, atol=2 * 2 * 64 * 2.0**-24 * size)
    assert record.metrics["rewards/reward_model/std"] > 0.1


def test_another_learner_on_a_cluster_must_want_the_same() -> None:
    """Data that end, here in the second step and long before `max_steps`, end the training; the last batch is short."""
    ended, data = Run(steps=10), PromptLoader(PROMPTS, P, num_epochs=1)
    ended.learner.train(PromptLoader([*PROMPTS, *PROMPTS[:3]], P, num_epochs=1))
    last = ended.records[-1]
    assert (len(last.groups), last.step, last.total) == (3, 2, 10)
    assert last.metrics["grad_norm"] > 0
    with pytest.raises(RecipeError, match="prepared already") as caught:
        ended.another_learner(replace(ended.config, beta=0.0)).train(data)
    assert "RLCluster(actor=cluster.actor" in caught.value.fix
    before = {name: np.array(x) for name, x in flatten(ended.cluster.trainer.params).items()}
    ended.another_learner(ended.config).train(data)
    assert ended.records[-1].step == 1
    assert ended.cluster.trainer.step == 3
    for name, x in flatten(ended.cluster.trainer.params).items():  # from where the weights were
        np.testing.assert_allclose(x, before[name], atol=0.05, err_msg=name)
        assert not np.array_equal(x, before[name])


def test_a_reward_that_writes_into_what_it_is_passed_changes_no_later_epoch() -> None:
    """Nested columns and chat messages: the second epoch reads them as the first did, and so do the observers."""
    seen: list[list[str]] = []

    def vandal(
        prompts: list[Any], completion_ids: list[list[int]], marks: list[Any], scale: list[list[int]]
    ) -> list[float]:
        seen.append(sorted({repr(row) for row in zip(prompts, marks, scale, strict=True)}))
        for prompt, mark, numbers in zip(prompts, marks, scale, strict=True):
            prompt[0]["content"] = mark["allowed"][0] = "mine"
            numbers[0] = 9
        return middle(completion_ids)

    rows = [
        {"prompt": [{"role": "user", "content": letter}], "marks": {"allowed": [letter]}, "scale": np.arange(3)}
        for letter in "abcdefgh"
    ]
    made = Run(steps=2)
    made.cluster.tokenizer.chat_template = "{{ messages[0]['content'] }}"
    made.cluster.rollout.tokenizer = made.cluster.tokenizer
    learner = GRPOLearner(
        rl_cluster=made.cluster, reward_fns=vandal, grpo_config=made.config, observers=[made.records.append]
    )
    learner.train(PromptLoader(rows, P, num_epochs=2))
    assert len(seen[0]) == P
    assert seen[0] == seen[1]
    for record in made.records:
        assert sorted(g.prompt[0]["content"] for g in record.groups) == list("abcdefgh")  # type: ignore[index]
