"""PPO (Schulman et al., 2017) for language models (Ouyang et al., 2022): a critic estimates the value of each state.

The loop is `learner.Learner.train`; this module computes advantages from rewards and values, and trains the critic
with its own optimizer.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from covey.config.algorithms import Algorithm
from covey.config.schema import GRPOConfig, PPOConfig
from covey.errors import RecipeError
from covey.losses.advantages import gae, whiten
from covey.losses.shaping import token_rewards
from covey.losses.value import explained_variance
from covey.parallel import processes
from covey.rewards.call import RewardFns
from covey.rl.batches import TrainBatch
from covey.rl.cluster import RLCluster
from covey.rl.learner import Learner
from covey.rl.roles import Role
from covey.rl.step_data import Experience, tokens_in_loss
from covey.train.trainer import Metrics


class PPOLearner(Learner):
    """Train the cluster's actor and critic by PPO.

    Args:
        rl_cluster: the models. A cluster without a critic makes one: a copy of the actor's base with a new head.
        reward_fns: functions `fn(prompts, completions, **columns) -> list[float | None]`, or the names of built-in
            ones.
        ppo_config: the algorithm: a preset with a critic, and the settings that override it.
        others: see `Learner`.

    Raises:
        RecipeError: the algorithm has no critic, or see `Learner`.
    """

    def __init__(
        self,
        *,
        rl_cluster: RLCluster,
        reward_fns: RewardFns | None = None,
        ppo_config: GRPOConfig | None = None,
        **others: Any,
    ):
        super().__init__(ppo_config or PPOConfig(), rl_cluster=rl_cluster, reward_fns=reward_fns, **others)
        if not self.algorithm.needs_critic:
            raise RecipeError(
                f"the algorithm {self.algorithm.name!r} has no critic",
                fix="GRPOLearner(rl_cluster=..., grpo_config=...)",
                where="PPOLearner",
            )

    def estimate_advantages(self, experience: Experience) -> Experience:
        """Compute advantages and returns by GAE."""
        return gae_advantages(experience, self.algorithm, self.beta)

    def update(self, batches: Iterable[TrainBatch]) -> Metrics:
        """Make one optimizer step of the actor and one of the critic; none when the gradient of either is not finite.

        The actor's gradient, one float32 array per trainable array, is kept while the critic's is computed.
        """
        actor_gradients = self.cluster.gradients(Role.ACTOR, batches)
        critic_gradients = self.cluster.gradients(Role.CRITIC, batches)
        actor = self.cluster.apply(Role.ACTOR, actor_gradients)
        critic = self.cluster.apply(Role.CRITIC, critic_gradients)
        explained = {"critic/explained_variance": _explained_variance(batches)}
        return actor | {f"critic/{name}": value for name, value in critic.items()} | explained


def _explained_variance(batches: Iterable[TrainBatch]) -> float:
    """Compute the explained variance of the returns by the critic's values."""
    pairs = list[tuple[np.ndarray, np.ndarray]]()
    for batch in batches:
        if batch.value_inputs is not None:
            returns, values, weight = (x[batch.rows_to_sum] for x in batch.value_inputs)
            pairs.append((values[weight > 0], returns[weight > 0]))
    total = lambda sums: np.sum(processes.here().all_gather(sums, "explained variance"), axis=0)  # noqa: E731
    return explained_variance([v for v, _ in pairs], [r for _, r in pairs], total)


def gae_advantages(x: Experience, algorithm: Algorithm, beta: float) -> Experience:
    """Return the experience with each token's advantage and return.

    A token's reward is −β·KL where the KL is in the reward, plus the completion's reward at its last token. A
    completion that no function scored gives no gradient: its advantages are 0 and its returns equal its values. The
    same holds for tokens that a tool inserted; only tokens that the model sampled count.
    """
    assert x.values is not None, "compute_logps computes values for an algorithm with a critic"
    penalties = x.kl_penalties(algorithm, beta) or [np.zeros(n) for n in x.lengths]
    rewards = x.completion_rewards
    rewards_per_token = token_rewards(rewards, penalties, x.sampled_masks)
    advantages, returns = gae(
        rewards_per_token, x.values, gamma=algorithm.gamma, lam=algorithm.gae_lambda, mask=x.sampled_masks
    )
    scored = [np.full(n, not np.isnan(r)) for n, r in zip(x.lengths, rewards, strict=True)]
    if algorithm.whiten:
        in_loss = [tokens_in_loss(c, algorithm.mask_truncated) for g in x.groups for c in g.completions]
        counted = [s & t for s, t in zip(scored, in_loss, strict=True)]
        advantages = whiten(advantages, counted, partial(x.table.collect_numbers, name="advantages"))
    advantages = [np.where(is_scored, a, 0.0) for is_scored, a in zip(scored, advantages, strict=True)]
    returns = [np.where(is_scored, r, v) for is_scored, r, v in zip(scored, returns, x.values, strict=True)]
    means = iter([float(a[m].mean()) if m.any() else 0.0 for a, m in zip(advantages, x.sampled_masks, strict=True)])
    groups = [replace(g, advantages=np.array([next(means) for _ in g.completions], np.float32)) for g in x.groups]
    return replace(x, groups=groups, advantages=advantages, returns=returns)
