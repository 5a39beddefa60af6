"""Advantage estimators, in float64 on the host.

They map the rewards of groups [P, G] to advantages [P, G]; a function with a parameter `groups` also gets the P groups,
with their texts and tokens. PPO's map the rewards and values of tokens to advantages and returns of tokens. A
completion that no function scored (NaN) is left out of every mean and gets 0. A group whose rewards are all equal gets
exactly 0: rounding in the mean must not become a gradient. A function of `ADVANTAGES` keeps the order of the rewards of
a group and does not change when all of them are shifted; its advantages need not sum to 0.
"""

import inspect
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from jaxtyping import Bool, Float

from covey.config import advantages

STD_EPSILON = 1e-4
"""Constant added to standard deviations of rewards, as in TRL."""

EQUALITY_TOLERANCE = 1e-12
"""Tolerance within which rewards count as equal, relative to their size: 0.1 + 0.2 is 0.3. The size of a sum is that of
its summands: 0.1 + 0.2 − 0.3 is 0.
"""

Rewards = Float[np.ndarray, "P G"]
AdvantageFn = Callable[..., Rewards]
"""Function (rewards), or (rewards, groups: Sequence[Group]), → advantages."""


def group_zscore(rewards: Rewards) -> Rewards:
    """Compute (R − mean of the group) / (std of the group + 1e-4), std with ddof 1 (Shao et al., 2024, section 4.1).

    >>> group_zscore(np.array([[1.0, 0.0], [0.5, 0.5]])).round(4).tolist()
    [[0.707, -0.707], [0.0, 0.0]]
    """
    return _map_groups(rewards, lambda values: (values - values.mean()) / (values.std(ddof=1) + STD_EPSILON))


def batch_std(rewards: Rewards) -> Rewards:
    """Compute (R − mean of the group) / (std of all rewards of the step + 1e-4), std with ddof 1 (Liu et al., 2025,
    "Tricks or traps? A deep dive into RL for LLM reasoning").

    >>> batch_std(np.array([[1.0, 0.0], [0.5, 0.5]])).round(4).tolist()
    [[1.2244, -1.2244], [0.0, 0.0]]
    """
    scored = rewards[~np.isnan(rewards)]
    std = scored.std(ddof=1) if scored.size > 1 else 0.0
    return centred(rewards) / (std + STD_EPSILON)


def centred(rewards: Rewards) -> Rewards:
    """Compute R − mean of the group (Liu et al., 2025, Dr. GRPO).

    >>> centred(np.array([[1.0, 0.0], [0.5, 0.5]])).tolist()
    [[0.5, -0.5], [0.0, 0.0]]
    """
    return _map_groups(rewards, lambda values: values - values.mean())


def leave_one_out(rewards: Rewards) -> Rewards:
    """Compute R − mean of the group's other rewards (Ahmadian et al., 2024, RLOO).

    >>> leave_one_out(np.array([[3.0, 0.0, 0.0], [0.5, 0.5, 0.5]])).tolist()
    [[3.0, -1.5, -1.5], [0.0, 0.0, 0.0]]
    """
    return _map_groups(rewards, lambda values: (values - values.mean()) * values.size / (values.size - 1))


def reads_groups(compute: AdvantageFn) -> bool:
    """Return whether an advantage function takes the groups too.

    >>> reads_groups(centred), reads_groups(lambda rewards, groups: rewards), reads_groups(np.asarray)
    (False, True, False)
    """
    try:
        return "groups" in inspect.signature(compute).parameters
    except ValueError:  # some functions in C have no signature
        return False


def reward_table(rewards: Sequence[Float[np.ndarray, "G"]]) -> Rewards:
    """Return the rewards of groups as a table, with NaN behind those of smaller groups.

    >>> reward_table([np.array([1.0, 0.0]), np.array([0.5])]).tolist()
    [[1.0, 0.0], [0.5, nan]]
    """
    table = np.full((len(rewards), max(map(len, rewards), default=1)), np.nan)
    for row, group in zip(table, rewards, strict=True):
        row[: len(group)] = group
    return table


def has_reward_variance(group: Float[np.ndarray, "G"], size: float | None = None) -> bool:
    """Return True when the rewards of a group differ: only then does it give a gradient. `size` is the largest sum of
    the sizes of their summands; by default they are no sums.
    """
    scored = group[~np.isnan(group)]
    return scored.size > 1 and not _all_equal(scored, size)


def merge_ties(sums: Float[np.ndarray, "n"], sizes: Float[np.ndarray, "n"]) -> Float[np.ndarray, "n"]:
    """Return sums of a group in which those that differ by rounding alone are equal, so that no later comparison has to
    know their summands.

    Args:
        sums: sums of numbers; NaN where there is none.
        sizes: sums of the absolute values of the same numbers.

    >>> merge_ties(np.array([0.1 + 0.2 - 0.3, 0.0, 0.1 + 0.2, 0.3]), np.array([0.6, 0.0, 0.3, 0.3])).tolist()
    [0.0, 0.0, 0.3, 0.3]
    """
    out, sizes = np.where(np.abs(sums) < EQUALITY_TOLERANCE * sizes, 0.0, sums), sizes.copy()
    for before, number in pairwise(np.argsort(out)):
        size = max(sizes[before], sizes[number])
        if out[number] - out[before] <= EQUALITY_TOLERANCE * size:
            out[number], sizes[number] = min(out[number], out[before]), size
    return out


def gae(
    rewards: Sequence[Float[np.ndarray, "n"]],
    values: Sequence[Float[np.ndarray, "n"]],
    *,
    gamma: float,
    lam: float,
    mask: Sequence[Bool[np.ndarray, "n"]] | None = None,
) -> tuple[list[Float[np.ndarray, "n"]], list[Float[np.ndarray, "n"]]]:
    """Compute generalised advantage estimates (Schulman et al., 2016, eq. 16): A_t = δ_t + γλ·A_{t+1} with
    δ_t = r_t + γ·V_{t+1} − V_t. The value after the last token is 0.

    The steps t are the tokens that the policy sampled. Tokens that a tool inserted between two of them are not steps:
    they are skipped, and nothing is discounted over them.

    Args:
        rewards: reward of each token, one array per completion.
        values: the critic's value of the state that each token was sampled from.
        gamma: discount γ.
        lam: λ; 0 relies on the critic alone, 1 on the rewards alone.
        mask: True for the tokens that the policy sampled; None means all.

    Returns:
        Advantages, 0 at skipped tokens, and returns A + V, the targets of the critic. Whiten the advantages
        afterwards, never the returns.

    >>> gae([np.array([0.0, 1.0])], [np.array([0.5, 0.25])], gamma=1.0, lam=0.5)
    ([array([0.125, 0.75 ])], [array([0.625, 1.   ])])
    """
    samples = zip(zip_equal_lengths(rewards, values), token_masks(mask, values), strict=True)
    advantages = [_gae_single(np.asarray(r, float), np.asarray(v, float), m, gamma, lam) for (r, v), m in samples]
    return advantages, [a + v for a, v in zip_equal_lengths(advantages, values)]


def whiten(
    arrays: Sequence[Float[np.ndarray, "n"]],
    mask: Sequence[Bool[np.ndarray, "n"]] | None = None,
    collect: Callable[[np.ndarray], np.ndarray] = lambda numbers: numbers,
) -> list[Float[np.ndarray, "n"]]:
    """Compute (x − mean) / (std + 1e-8) over all numbers of all arrays, std with ddof 1 as in TRL, Tunix and verl:
    mean 0, variance 1.

    Args:
        arrays: one per completion.
        mask: True for the tokens that count; the others get 0. None means all.
        collect: returns the numbers of each completion of all processes, [B, k], given those of this one, [b, k].

    Returns:
        Arrays of the same lengths. A single number, or equal ones, become 0.

    >>> arrays, mask = [np.array([1.0, 3.0]), np.array([5.0])], [np.array([True, True]), np.array([False])]
    >>> [a.round(4).tolist() for a in whiten(arrays, mask)]
    [[-0.7071, 0.7071], [0.0]]
    """
    masks = token_masks(mask, arrays)
    counted = [np.asarray(a, np.float64)[m] for a, m in zip_equal_lengths(arrays, masks)]
    # Sums of completions, so that the result does not depend on how these are divided among processes.
    limits = [(len(x), x.sum(), x.min(initial=np.inf), x.max(initial=-np.inf)) for x in counted]
    counts, sums, least, most = collect(np.reshape(limits, (-1, 4))).T
    count = counts.sum()
    if not count or _all_equal(np.array([least.min(), most.max()])):
        return [np.zeros(len(a)) for a in arrays]
    mean = sums.sum() / count
    squares = collect(np.reshape([((x - mean) ** 2).sum() for x in counted], (-1, 1)))
    std = np.sqrt(squares.sum() / (count - 1))
    return [np.where(m, (a - mean) / (std + 1e-8), 0.0) for a, m in zip_equal_lengths(arrays, masks)]


def token_masks(mask: Sequence[np.ndarray] | None, arrays: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    """Return `mask`, checked to have one entry per number of `arrays`; None means that all numbers count."""
    masks = [np.ones(len(a), bool) for a in arrays] if mask is None else mask
    return [m for _, m in zip_equal_lengths(arrays, masks)]


def _map_groups(rewards: Rewards, of_group: Callable[[np.ndarray], np.ndarray]) -> Rewards:
    out = np.zeros(rewards.shape)
    for row, group in zip(out, rewards, strict=True):
        if has_reward_variance(group):
            scored = ~np.isnan(group)
            row[scored] = of_group(group[scored])
    return out


def _all_equal(values: Float[np.ndarray, "n"], size: float | None = None) -> bool:
    return bool(np.ptp(values) <= EQUALITY_TOLERANCE * (np.abs(values).max() if size is None else size))


def zip_equal_lengths(left: Sequence[np.ndarray], right: Sequence[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the pairs of arrays, checked to have equal shapes."""
    pairs = list(zip(left, right, strict=True))
    assert all(a.shape == b.shape for a, b in pairs), "one number per token in both, or NumPy would broadcast"
    return pairs


def _gae_single(rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    out, next_advantage, next_value = np.zeros(len(values)), 0.0, 0.0
    for t in reversed(np.flatnonzero(mask)):
        delta = rewards[t] + gamma * next_value - values[t]
        out[t] = next_advantage = delta + gamma * lam * next_advantage
        next_value = values[t]
    return out


ADVANTAGES: dict[str, AdvantageFn] = {
    name: globals()[name] for name, row in advantages.ADVANTAGES.items() if not row.needs_critic
}
"""Advantage functions of groups by name."""
