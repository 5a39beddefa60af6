"""Advantages of turns: each is compared with the same turn of the group's other episodes (`grpo.credit: turn`)."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from jaxtyping import Float

from covey.config.algorithms import Algorithm
from covey.losses.advantages import AdvantageFn, merge_ties
from covey.rl.step_data import Experience, sampled_mask
from covey.types import Completion


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
    for group, totals in zip(x.groups, all_rewards[x.table.local_groups], strict=True):
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
    for group, table in zip(x.groups, (of_groups[number] for number in x.table.local_groups), strict=True):
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


def turn_returns(rewards: Float[np.ndarray, "K"], gamma: float) -> Float[np.ndarray, "K"]:
    """Compute the return of each of K turns: its reward and the discounted ones after it, R_k = r_k + γ·R_{k+1}.

    >>> turn_returns(np.array([1.0, 0.0, 2.0]), 0.5).tolist()
    [1.5, 1.0, 2.0]
    """
    out, later = np.zeros(len(rewards)), 0.0
    for k in reversed(range(len(rewards))):
        out[k] = later = rewards[k] + gamma * later
    return out
