"""GRPO (Shao et al., 2024, DeepSeekMath) and its variants: each completion is compared with its group.

The loop is `learner.Learner.train`; this module computes advantages from rewards.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from covey.config.algorithms import Algorithm
from covey.config.schema import GRPOConfig
from covey.errors import RecipeError
from covey.losses.advantages import ADVANTAGES, AdvantageFn, reads_groups, reward_table
from covey.registry import offered
from covey.rewards.call import RewardFns
from covey.rl.cluster import RLCluster
from covey.rl.learner import Learner
from covey.rl.step_data import Experience
from covey.types import Group


class GRPOLearner(Learner):
    """Train the cluster's actor by a group-relative algorithm.

    Args:
        rl_cluster: the models.
        reward_fns: functions `fn(prompts, completions, **columns) -> list[float | None]`, or the names of built-in
            ones.
        grpo_config: the algorithm: a preset and the settings that override it.
        advantage_fn: `fn(rewards [P, G]) -> [P, G]`, or `fn(rewards, groups)` with the P groups, their texts and
            tokens, in place of the algorithm's. NaN stands for a completion that is not scored, and after the rewards
            of smaller groups.
        others: see `Learner`.

    Raises:
        RecipeError: the algorithm needs a critic, the credit of turns cannot read groups, or see `Learner`.
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
        if self.algorithm.needs_critic and advantage_fn is None:
            raise RecipeError(
                f"the algorithm {self.algorithm.name!r} takes its advantages from a critic",
                fix="PPOLearner(rl_cluster=..., ppo_config=...)",
                where="GRPOLearner",
            )
        self.advantage_fn = advantage_fn or ADVANTAGES[self.algorithm.advantage]
        if self.algorithm.credit == "turn" and reads_groups(self.advantage_fn):
            raise RecipeError(
                "grpo.credit turn compares the turns of a group, and the advantage function reads whole groups",
                fix="grpo.credit episode, or a function of rewards alone",
                where="GRPOLearner",
            )

    def estimate_advantages(self, experience: Experience) -> Experience:
        """Compute each completion's advantage over its group, at each of its tokens."""
        return group_advantages(experience, self.algorithm, self.beta, self.advantage_fn)


def group_advantages(
    x: Experience, algorithm: Algorithm, beta: float, advantage_fn: AdvantageFn | None = None
) -> Experience:
    """Return the experience with advantages from its groups' rewards. Where the KL is in the reward, β·KL of all tokens
    that the model sampled is subtracted first.
    """
    penalties = x.kl_penalties(algorithm, beta)
    compute = advantage_fn or ADVANTAGES[algorithm.advantage]
    if algorithm.credit == "turn":
        of_turns: Experience = offered("covey.credit", "turn")(x, algorithm, partial(_as_table, compute), penalties)
        return of_turns
    rewards = x.table.reward_table
    if penalties is not None:
        sums = x.table.collect_numbers(np.array([p.sum() for p in penalties]), "KL of completions")
        rewards = rewards - reward_table(x.table.split(sums))
    groups = {"groups": x.table.collect(x.groups, "groups")} if reads_groups(compute) else {}
    advantages = _as_table(compute, rewards, **groups).astype(np.float32)[x.table.local_groups]
    scored = [replace(g, advantages=a[: len(g.completions)]) for g, a in zip(x.groups, advantages, strict=True)]
    of_completions = np.concatenate([np.zeros(0, np.float32), *(g.advantages for g in scored)])
    per_token = [np.full(n, a) for n, a in zip(x.lengths, of_completions, strict=True)]
    return replace(x, groups=scored, advantages=per_token)


def _as_table(compute: AdvantageFn, rewards: np.ndarray, **groups: Sequence[Group]) -> np.ndarray:
    """Call a function, perhaps of the user's, and return its advantages as an array like `rewards`."""
    return np.asarray(compute(rewards, **groups)).reshape(rewards.shape)
