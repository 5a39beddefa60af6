"""The loss of episodes: that of the model's own tokens, each after all that came before it, whoever said it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from covey.config.algorithms import algorithm_of
from covey.config.schema import GRPOConfig, RLTrainingConfig, RolloutConfig
from covey.models.attention import causal_attention
from covey.rewards import environment_reward
from covey.rl.batch import RowBatch, policy_loss_fn
from covey.rl.experience import ExperienceBuilder
from covey.rl.grpo import group_advantages
from covey.rl.metrics import group_metrics
from covey.rl.roles import ClusterConfig
from covey.rl.stage_sizes import stage_sizes
from covey.sampling.stats import SamplerStats
from covey.types import Completion, Episode, Group

G = 2
REWARDS = (1.0, 0.25, 0.0, 3.0)


def episode(completion: Completion, reward: float, rng: np.random.Generator) -> Completion:
    """Some tokens are the environment's; their log-probs are 0."""
    mask = rng.random(len(completion.tokens)) < 0.6
    mask[[0, -1]] = True
    shown = Episode(reward=reward, turn_rewards=(reward,), turn_ends=(2, len(mask)), done=True, seconds=0.5)
    return replace(completion, mask=mask, episode=shown, logps=np.where(mask, completion.logps, 0).astype(np.float32))


def episodes_of(groups: Sequence[Group]) -> list[Group]:
    rng, rewards = np.random.default_rng(3), iter(REWARDS)
    return [replace(g, completions=tuple(episode(c, next(rewards), rng) for c in g.completions)) for g in groups]


@pytest.mark.slow
def test_the_gradient_is_that_of_the_models_tokens_alone(
    decoder: Callable[..., Any], groups_of: Callable[..., Any], made_by: Callable[..., Any]
) -> None:
    """Against one sequence at a time: Σ of advantage · mean over the sampled tokens of their log-probs."""
    groups, config = episodes_of(groups_of([(5, [12, 9]), (3, [7, 15])])), GRPOConfig(num_generations=G, beta=0.0)

    def generate(rows: Sequence[Mapping[str, Any]], samples: int, *, step: int, first: int) -> list[Group]:
        return groups[first : first + len(rows)]

    training = RLTrainingConfig(prompts_per_step=2)
    cluster: Any = SimpleNamespace(
        config=ClusterConfig({}, training, RolloutConfig(max_new_tokens=20)),
        rollout=SimpleNamespace(stats=SamplerStats(tokens=1)),
        compile_cost=0.0,
        generate=generate,
    )
    algorithm = algorithm_of(config)
    builder = ExperienceBuilder(
        cluster=cluster,
        reward_fns=[environment_reward("game")],
        config=config,
        algorithm=algorithm,
        sizes=stage_sizes(training, G),
        estimate=lambda x, beta: group_advantages(x, algorithm, beta),
        beta=0.0,
        examples=[{"prompt": "p"}] * 2,
        take=lambda count: [],
        step=0,
    )
    batches = made_by(builder)
    graph, params = nnx.split(decoder())

    def packed(params: Any) -> jax.Array:
        loss = policy_loss_fn(algorithm, 1.0)
        return sum(loss(graph, params, RowBatch(b.rows, b.inputs))[0] for b in batches) / sum(
            b.denominator for b in batches
        )

    def by_hand(params: Any) -> jax.Array:
        model, total = nnx.merge(graph, params), 0.0
        for group in builder.log.groups:
            for completion, advantage in zip(group.completions, group.advantages, strict=True):
                tokens = jnp.concatenate([group.prompt_tokens, completion.tokens])[None]
                positions = jnp.arange(tokens.shape[1])[None]
                hidden, _ = model(tokens, positions, causal_attention(jnp.ones(tokens.shape, bool), positions))
                logps = jax.nn.log_softmax(model.logits(hidden[0, len(group.prompt_tokens) - 1 : -1]))
                picked = logps[np.arange(len(completion.tokens)), completion.tokens]
                total -= advantage * jnp.sum(picked * completion.mask) / completion.mask.sum()
        return total / 4

    got, wanted = (jax.tree.leaves(jax.jit(jax.grad(f))(params)) for f in (packed, by_hand))
    assert max(float(jnp.abs(w).max()) for w in wanted) > 1e-3
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert [g.rewards_by_function["game"].tolist() for g in builder.log.groups] == [[1.0, 0.25], [0.0, 3.0]]
    metrics, sampled = group_metrics(builder.log.groups), [int(c.mask.sum()) for g in groups for c in g.completions]
    assert metrics["completions/mean_length"] == np.mean(sampled)
    assert metrics["env/tokens"] == (12 + 9 + 7 + 15 - sum(sampled)) / 4
    assert (metrics["env/turns"], metrics["env/done"], metrics["env/failed"]) == (2, 1, 0)
