"""GRPO (Shao et al., 2024, DeepSeekMath) and its variants: each completion is compared with its group.

The loop is `learner.Learner.train`; this module computes advantages from rewards.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from covey.config.algorithms import Algorithm
from covey.config.schema import GRPOConfig
from covey.errors import RecipeError
from covey.losses.advantages import ADVANTAGES, AdvantageFn
from covey.losses.shaping import kl_penalty
from covey.parallel import distributed
from covey.rl.cluster import RLCluster
from covey.rl.experience import Experience
from covey.rl.learner import Learner, RewardFns


class GRPOLearner(Learner):
    """Train the cluster's actor by a group-relative algorithm.

    Args:
        rl_cluster: the models.
        reward_fns: functions `fn(prompts, completions, **columns) -> list[float | None]`, or the names of built-in
            ones.
        grpo_config: the algorithm: a preset and the settings that override it.
        advantage_fn: `fn(rewards [P, G]) -> [P, G]` on a service batch's groups (those of all processes), instead
            of the algorithm's.
        others: see `Learner`.

    Raises:
        RecipeError: the algorithm needs a critic, or see `Learner`.
    """

    def __init__(
        self,
        *,
        rl_cluster: RLCluster,
        reward_fns: RewardFns | None = None,
        grpo_config: GRPOConfig | None = None,
        advantage_fn: AdvantageFn | None = None,
        **others: Any,
    ):
        super().__init__(grpo_config or GRPOConfig(), rl_cluster=rl_cluster, reward_fns=reward_fns, **others)
        if self.algorithm.has_critic and advantage_fn is None:
            raise RecipeError(
                f"the algorithm {self.algorithm.name!r} takes its advantages from a critic",
                fix="PPOLearner(rl_cluster=..., ppo_config=...)",
                where="GRPOLearner",
            )
        self.advantage_fn = advantage_fn

    def estimate(self, experience: Experience, beta: float) -> Experience:
        """Compute each completion's advantage over its group, at each of its tokens."""
        return group_advantages(experience, self.algorithm, beta, self.advantage_fn)


def group_advantages(
    x: Experience, algorithm: Algorithm, beta: float, advantage_fn: AdvantageFn | None = None
) -> Experience:
    """Return the experience with advantages from its groups' rewards. Where the KL is in the reward, β·KL of all tokens
    that the model sampled is subtracted first.
    """
    rewards = x.rewards
    if algorithm.kl_in == "reward" and x.ref_logps is not None:
        penalties = kl_penalty(x.policy_logps, x.ref_logps, algorithm.kl, beta, x.sampled_masks)
        rewards = rewards - np.array([p.sum() for p in penalties]).reshape(rewards.shape)
    compute = advantage_fn or ADVANTAGES[algorithm.advantage]
    over_groups = advantage_fn is not None or algorithm.advantage == "batch_std"
    advantages = (_compute_over_processes(compute, rewards) if over_groups else compute(rewards)).astype(np.float32)
    groups = [replace(g, advantages=a) for g, a in zip(x.groups, advantages, strict=True)]
    per_token = [np.full(n, a) for n, a in zip(x.lengths, advantages.ravel(), strict=True)]
    return replace(x, groups=groups, advantages=per_token)


def _compute_over_processes(compute: AdvantageFn, rewards: np.ndarray) -> np.ndarray:
    """Compute advantages that depend on other groups too, over the groups of all processes."""
    advantages = distributed.jointly(lambda rows: list(compute(np.stack(rows))), list(rewards), "rewards")
    return np.asarray(advantages).reshape(rewards.shape)
