"""Reward shaping before advantages: the overlong penalty, and the KL where it is part of the reward instead of a term
of the loss. It runs on the host, in float64; lengths are in tokens, never in characters.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from covey.losses.advantages import token_masks, zip_equal_lengths
from covey.losses.policy import KLS

MAX_KL_ERROR = 0.2
"""Largest relative error that `adapt_beta` reacts to."""

PerToken = Float[np.ndarray, "n"]
Masks = Sequence[Bool[np.ndarray, "n"]]
"""One mask per completion: True for tokens that the policy sampled, False for tokens that a tool inserted."""


def overlong_penalty(
    lengths: Int[np.ndarray, "B"], *, max_new_tokens: int, buffer: float, penalty: float
) -> Float[np.ndarray, "B"]:
    """Compute the length penalty of each completion: 0 up to L − buffer tokens, from there linearly down to −penalty at
    L = `max_new_tokens`, and never below (Yu et al., 2025, DAPO, eq. 13).

    Args:
        lengths: tokens of each completion, the stop token included.
        buffer: tokens; below 1 a fraction of `max_new_tokens`, 0 turns the penalty off.
        penalty: penalty at L.

    >>> overlong_penalty(np.array([50, 80, 90, 100, 120]), max_new_tokens=100, buffer=20, penalty=1.0).tolist()
    [0.0, 0.0, -0.5, -1.0, -1.0]
    """
    ramp = buffer * max_new_tokens if buffer < 1 else buffer
    if not ramp:
        return np.zeros(len(lengths))
    return penalty * np.clip((max_new_tokens - ramp - np.asarray(lengths)) / ramp, -1.0, 0.0)


def kl_penalty(
    logps: Sequence[PerToken],
    ref_logps: Sequence[PerToken],
    estimator: str,
    beta: float,
    mask: Masks | None = None,
) -> list[PerToken]:
    """Compute β·KL of each token, one array per completion; its sum is subtracted from the completion's reward.

    Use k1 in a reward: its sum is log(policy / reference) of the whole completion. The expected gradient is then the
    gradient of the KL (Ouyang et al., 2022, eq. 2).

    Args:
        logps: log-probs under the policy that sampled.
        ref_logps: log-probs of the same tokens under the reference.
        estimator: a name of `KLS`.
        beta: weight β.
        mask: True for the tokens that the policy sampled; the others get 0. None means all.

    >>> kl_penalty([np.array([-1.0, -2.0]), np.zeros(0)], [np.array([-1.5, -1.5]), np.zeros(0)], "k1", beta=0.1)
    [array([ 0.05, -0.05]), array([], dtype=float64)]
    """
    samples = zip(zip_equal_lengths(logps, ref_logps), token_masks(mask, logps), strict=True)
    return [np.where(m, beta * KLS[estimator](*np.asarray(pair, np.float64)), 0.0) for pair, m in samples]


def token_rewards(
    rewards: Float[np.ndarray, "B"], penalties: Sequence[PerToken], mask: Masks | None = None
) -> list[PerToken]:
    """Compute the reward of each token, one array per completion: −penalty at each token that the policy sampled, plus
    the completion's reward at the last of them (Ouyang et al., 2022). A completion that no function scored (NaN), or
    without sampled tokens, gets zeros.

    >>> token_rewards(np.array([1.0, np.nan]), [np.array([0.1, 0.2]), np.array([0.3])])
    [array([-0.1,  0.8]), array([0.])]
    """
    samples = zip(rewards, penalties, token_masks(mask, penalties), strict=True)
    return [_completion_token_rewards(float(reward), penalty, m) for reward, penalty, m in samples]


def adapt_beta(beta: float, *, kl: float, target: float, horizon: int, samples: int) -> float:
    """Compute β for the next step, which steers the KL to `target`: β·(1 + clip(kl/target − 1, ±0.2)·samples/horizon)
    (Ziegler et al., 2019, section 2.2).

    Deviation from the paper: samples/horizon is at most 1, so that β keeps its sign. A KL of NaN (a step without
    tokens) leaves β unchanged.

    Args:
        beta: current β.
        kl: mean KL of the step.
        target: wanted KL.
        horizon: number of completions over which β adapts.
        samples: number of completions of the step.

    >>> round(adapt_beta(0.1, kl=12.0, target=6.0, horizon=10_000, samples=500), 6)
    0.101
    """
    if np.isnan(kl):
        return beta
    error = min(max(kl / target - 1, -MAX_KL_ERROR), MAX_KL_ERROR)
    return beta * (1 + error * min(samples / horizon, 1.0))


def _completion_token_rewards(reward: float, penalty: PerToken, mask: Bool[np.ndarray, "n"]) -> PerToken:
    if np.isnan(reward) or not mask.any():
        return np.zeros(len(penalty))
    out: PerToken = -np.where(mask, np.asarray(penalty, np.float64), 0.0)
    out[np.flatnonzero(mask)[-1]] += reward
    return out
