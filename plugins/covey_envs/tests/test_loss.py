"""The loss of episodes: that of the model's own tokens, each after all that came before it, whoever said it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from covey.config.schema import GRPOConfig, RLTrainingConfig, RolloutConfig
from covey.models.attention import causal_attention
from covey.rewards.call import environment_reward
from covey.rl.batches import RowBatch, RowSizes, policy_loss_fn
from covey.rl.grpo import GRPOLearner
from covey.rl.metrics import group_metrics
from covey.rl.roles import ClusterConfig
from covey.sampling.logits import SamplingParams
from covey.sampling.model_runner import SamplerStats
from covey.types import Branch, Completion, Episode, Group
from covey_envs.metrics import episode_metrics

G = 2
REWARDS = (1.0, 0.25, 0.0, 3.0)


def episode(completion: Completion, reward: float, rng: np.random.Generator) -> Completion:
    """Some tokens are the environment's; their log-probs are 0."""
    mask = rng.random(len(completion.tokens)) < 0.6
    mask[[0, -1]] = True
    shown = Episode(reward=reward, turn_rewards=(reward,), turn_ends=(2, len(mask)), done=True, seconds=0.5)
    return replace(completion, mask=mask, episode=shown, logps=np.where(mask, completion.logps, 0).astype(np.float32))


BRANCHES = [None, (), (Branch(3, 2),), (Branch(5, 4), Branch(9, 7))]
"""The first group has none; the branch of the third completion drops a token of the prompt."""


def episodes_of(groups: Sequence[Group]) -> list[Group]:
    rng, rewards, branches = np.random.default_rng(3), iter(REWARDS), iter(BRANCHES)
    played = [replace(g, completions=tuple(episode(c, next(rewards), rng) for c in g.completions)) for g in groups]
    return [replace(g, completions=tuple(replace(c, branches=next(branches)) for c in g.completions)) for g in played]


def sequences(prompt: np.ndarray, completion: Completion) -> Iterator[tuple[np.ndarray, slice]]:
    """Each branch as a whole sequence, with the place of its own tokens in the completion."""
    sequence, branches = prompt, [Branch(0, len(prompt)), *(completion.branches or ())]
    for (start, kept), (end, _) in pairwise([*branches, Branch(len(completion.tokens), 0)]):
        sequence = np.concatenate([sequence[:kept], completion.tokens[start:end]])
        yield sequence, slice(start, end)


@pytest.mark.slow
def test_the_gradient_is_that_of_the_models_tokens_alone(
    decoder: Callable[..., Any], groups_of: Callable[..., Any], made_by: Callable[..., Any]
) -> None:
    """Against padded rows of one sequence: Σ of advantage · mean over the sampled tokens of their ratios, all 1."""
    groups = episodes_of(groups_of([(5, [12, 9]), (3, [7, 15])]))
    config = GRPOConfig(num_generations=G, beta=0.0)

    def generate(rows: Sequence[Mapping[str, Any]], samples: int, *, step: int, first: int) -> list[Group]:
        return groups[first : first + len(rows)]

    settings = ClusterConfig({}, RLTrainingConfig(prompts_per_step=2), RolloutConfig(max_new_tokens=20))
    cluster: Any = SimpleNamespace(
        config=settings,
        row_sizes=RowSizes(settings),
        rollout=SimpleNamespace(stats=SamplerStats(tokens=1), environments=None),
        inference=SimpleNamespace(has=lambda role: False),
        measures_agreement=False,
        generate=generate,
    )
    learner = GRPOLearner(rl_cluster=cluster, reward_fns=environment_reward("game"), grpo_config=config)
    algorithm = learner.algorithm
    batches = made_by(learner, [{"prompt": "p"}] * 2, lambda count: [])
    graph, params = nnx.split(decoder())

    def packed(params: Any) -> jax.Array:
        loss = policy_loss_fn(algorithm, SamplingParams())
        return sum(loss(graph, params, RowBatch(b.rows, b.inputs))[0] for b in batches) / sum(
            b.denominator for b in batches
        )

    def by_hand(params: Any) -> jax.Array:
        parts = [
            (sequence, own, completion, advantage)
            for group in learner.stats.rollout.groups
            for completion, advantage in zip(group.completions, group.advantages, strict=True)
            for sequence, own in sequences(group.prompt_tokens, completion)
        ]
        tokens = np.zeros((len(parts), max(len(sequence) for sequence, *_ in parts)), np.int32)
        valid, weights = np.zeros(tokens.shape, bool), np.zeros(tokens.shape)
        for row, (sequence, own, completion, advantage) in enumerate(parts):
            end, count = len(sequence), own.stop - own.start
            tokens[row, :end], valid[row, :end] = sequence, True
            weights[row, end - count : end] = advantage * completion.mask[own] / completion.mask.sum()
        model, positions = nnx.merge(graph, params), jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden, _ = model(tokens, positions, causal_attention(jnp.asarray(valid), positions))
        logps = jax.nn.log_softmax(model.logits(hidden))[:, :-1]
        picked = jnp.take_along_axis(logps, tokens[:, 1:, None], -1)[..., 0]
        return -jnp.sum(weights[:, 1:] * jnp.exp(picked - jax.lax.stop_gradient(picked))) / 4

    (loss, got), (wanted_loss, wanted) = (jax.jit(jax.value_and_grad(f))(params) for f in (packed, by_hand))
    np.testing.assert_allclose(loss, wanted_loss, atol=1e-5)
    got, wanted = jax.tree.leaves(got), jax.tree.leaves(wanted)
    assert max(float(jnp.abs(w).max()) for w in wanted) > 1e-3
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert [g.rewards_by_function["game"].tolist() for g in learner.stats.rollout.groups] == [[1.0, 0.25], [0.0, 3.0]]
    table = learner.stats.rollout.table
    metrics = group_metrics(table) | episode_metrics(table)
    sampled = [int(c.mask.sum()) for g in groups for c in g.completions]
    assert metrics["completions/mean_length"] == np.mean(sampled)
    assert metrics["env/tokens"] == (12 + 9 + 7 + 15 - sum(sampled)) / 4
    assert (metrics["env/turns"], metrics["env/done"], metrics["env/failed"]) == (2, 1, 0)
