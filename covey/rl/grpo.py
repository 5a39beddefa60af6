"""GRPO (Shao et al., 2024, DeepSeekMath) and its variants: each completion is compared with its group.

The loop is `learner.Learner.train`; this module computes advantages from rewards.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Float

from covey.config.algorithms import Algorithm
from covey.config.schema import GRPOConfig
from covey.errors import RecipeError
from covey.losses.advantages import ADVANTAGES, AdvantageFn, merge_ties, reward_table, turn_returns
from covey.rewards import RewardFns
from covey.rl.cluster import RLCluster
from covey.rl.experience import Experience, sampled_mask
from covey.rl.learner import Learner
from covey.types import Completion


class GRPOLearner(Learner):
    """Train the cluster's actor by a group-relative algorithm.

    Args:
        rl_cluster: the models.
        reward_fns: functions `fn(prompts, completions, **columns) -> list[float | None]`, or the names of built-in
            ones.
        grpo_config: the algorithm: a preset and the settings that override it.
        advantage_fn: `fn(rewards [P, G]) -> [P, G]` on a service batch's groups, instead of the algorithm's; NaN stands
            for a completion that is not scored, and behind the rewards of smaller groups.
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
        if self.algorithm.needs_critic and advantage_fn is None:
            raise RecipeError(
                f"the algorithm {self.algorithm.name!r} takes its advantages from a critic",
                fix="PPOLearner(rl_cluster=..., ppo_config=...)",
                where="GRPOLearner",
            )
        self.advantage_fn = advantage_fn

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
    compute = ADVANTAGES[algorithm.advantage] if advantage_fn is None else partial(_as_table, advantage_fn)
    if algorithm.credit == "turn":
        return turn_advantages(x, algorithm, compute, penalties)
    rewards = x.table.reward_table
    if penalties is not None:
        sums = x.table.collect_numbers(np.array([p.sum() for p in penalties]), "KL of completions")
        rewards = rewards - reward_table(x.table.split(sums))
    advantages = compute(rewards).astype(np.float32)[x.table.own]
    groups = [replace(g, advantages=a[: len(g.completions)]) for g, a in zip(x.groups, advantages, strict=True)]
    of_completions = np.concatenate([np.zeros(0, np.float32), *(g.advantages for g in groups)])
    per_token = [np.full(n, a) for n, a in zip(x.lengths, of_completions, strict=True)]
    return replace(x, groups=groups, advantages=per_token)


def turn_advantages(
    x: Experience, algorithm: Algorithm, compute: AdvantageFn, penalties: Sequence[np.ndarray] | None = None
) -> Experience:
    """Return the experience with an advantage for each turn of its episodes, at all tokens of the turn.

    The return of turn k (`turn_returns`) is compared with the returns of turn k of the group's other episodes, those
    that have one; where no other has one it is 0 (as in Zeng et al., 2025, arXiv 2505.11821, for turns at the same
    place). A completion without an environment is one turn. The advantage of a completion, in the log, is the mean
    over its sampled tokens.

    Args:
        x: groups with rewards.
        algorithm: its weights of rewards and its discount.
        compute: advantages of rewards [turns, G], NaN where an episode has no such turn or was not scored.
        penalties: number to subtract from the reward of each token, one array per completion.
    """
    weight = algorithm.reward_weights[0] if algorithm.reward_weights else 1.0
    subtracted = penalties or [np.zeros(n) for n in x.lengths]
    tables, all_rewards, index = list[np.ndarray](), x.table.reward_table, 0
    for group, totals in zip(x.groups, all_rewards[x.table.own], strict=True):
        rewards = [
            turn_rewards(c, total, weight, penalty)
            for c, total, penalty in zip(group.completions, totals, subtracted[index:], strict=False)
        ]
        returns = [turn_returns(of_turns, algorithm.turn_gamma) for of_turns in rewards]
        sizes = [turn_returns(np.abs(of_turns), algorithm.turn_gamma) for of_turns in rewards]
        by_turn = zip(*(_by_turn(each, all_rewards.shape[1]) for each in (returns, sizes)), strict=True)
        tables.append(np.array([merge_ties(*of_turn) for of_turn in by_turn]))
        index += len(rewards)
    tables = x.table.collect(tables, "returns of turns")
    computed = compute(np.concatenate([np.zeros((0, all_rewards.shape[1])), *tables])).astype(np.float32)
    of_groups = np.split(computed, np.cumsum([len(table) for table in tables], dtype=int)[:-1])
    advantages, groups = [], []
    for group, table in zip(x.groups, (of_groups[number] for number in x.table.own), strict=True):
        of_group = [table[_turn_of_tokens(c), number] for number, c in enumerate(group.completions)]
        masks = [sampled_mask(c) for c in group.completions]
        means = [a[m].mean() if m.any() else 0.0 for a, m in zip(of_group, masks, strict=True)]
        groups.append(replace(group, advantages=np.array(means, np.float32)))
        advantages += of_group
    return replace(x, groups=groups, advantages=advantages)


def turn_rewards(
    completion: Completion, total: float, weight: float, penalty: Float[np.ndarray, "n"]
) -> Float[np.ndarray, "K"]:
    """Compute the reward of each turn of a completion: the environment's for the turn, and for the last one also the
    scores of the whole (other reward functions, penalties of length). NaN for all of them if `total` is NaN.

    Args:
        completion: a completion with or without an episode.
        total: reward of the whole completion.
        weight: weight of the environment's reward in it.
        penalty: number to subtract from the reward of each token.
    """
    ends, episode = _turn_ends(completion), completion.episode
    rewards = np.zeros(len(ends))
    if episode is not None and episode.reward is not None:
        of_turns = episode.turn_rewards[: len(ends)]
        rewards[: len(of_turns)] = weight * np.array(of_turns)
    rewards[-1] += total - rewards.sum()
    rewards -= [penalty[start:end].sum() for start, end in pairwise([0, *ends])]
    return rewards if not np.isnan(total) else np.full(len(ends), np.nan)


def _turn_ends(completion: Completion) -> tuple[int, ...]:
    """Return the number of tokens at the end of each turn; a completion without turns is one."""
    ends = completion.episode.turn_ends if completion.episode else ()
    return (*ends[:-1], len(completion.tokens))


def _turn_of_tokens(completion: Completion) -> np.ndarray:
    """Return the turn of each token, int [n]; tokens of the environment belong to the turn after them."""
    return np.searchsorted(_turn_ends(completion), np.arange(len(completion.tokens)), side="right")


def _by_turn(returns: Sequence[Float[np.ndarray, "K"]], size: int) -> Float[np.ndarray, "K G"]:
    """Return the returns of a group's episodes by turn, NaN where an episode has no such turn, for `size` episodes."""
    table = np.full((max(map(len, returns)), size), np.nan)
    for number, of_turns in enumerate(returns):
        table[: len(of_turns), number] = of_turns
    return table


def _as_table(compute: AdvantageFn, rewards: np.ndarray) -> np.ndarray:
    """Call a function of the user's, and return its advantages as an array like `rewards`."""
    return np.asarray(compute(rewards)).reshape(rewards.shape)
