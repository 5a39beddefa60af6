"""What is taken from a reward before it becomes an advantage: the overlong penalty, and the KL where it is part of the
reward instead of a term of the loss. On the host, in float64; lengths are in tokens, never in characters.
"""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from covey.losses.policy import LIMIT

STEP_CLIP = 0.2
"""Largest relative error that `adapted_beta` reacts to."""

PerToken = Float[np.ndarray, "n"]
Drawn = Sequence[Bool[np.ndarray, "n"]]
"""One mask a sample: True for the tokens that the policy drew, False for those that a tool put there."""


def overlong_penalty(
    lengths: Int[np.ndarray, "B"], max_new_tokens: int, buffer: float, penalty: float
) -> Float[np.ndarray, "B"]:
    """What each completion's length adds to its reward: 0 up to L − buffer tokens, from there linearly down to −penalty
    at L = `max_new_tokens`, and never below (Yu et al., 2025, DAPO, eq. 13).

    Args:
        lengths: tokens of each completion, the stop token included.
        buffer: tokens; below 1 a share of `max_new_tokens`, 0 is off.
        penalty: at L.

    >>> overlong_penalty(np.array([50, 80, 90, 100, 120]), max_new_tokens=100, buffer=20, penalty=1.0).tolist()
    [0.0, 0.0, -0.5, -1.0, -1.0]
    """
    room = buffer * max_new_tokens if buffer < 1 else buffer
    if not room:
        return np.zeros(len(lengths))
    return penalty * np.clip((max_new_tokens - room - np.asarray(lengths)) / room, -1.0, 0.0)


def kl_penalty(
    logps: Sequence[PerToken], ref_logps: Sequence[PerToken], estimator: str, beta: float, drawn: Drawn | None = None
) -> list[PerToken]:
    """β·KL of each token, one array a sample; their sum is what a sample's own reward loses.

    In a reward k1 is the one to use: its sum is log(policy / reference) of the whole answer, whose expected gradient is
    that of the KL (Ouyang et al., 2022, eq. 2).

    Args:
        logps: under the policy that sampled.
        ref_logps: of the same tokens under the reference.
        estimator: a name of `KLS`.
        beta: weight β.
        drawn: the other tokens cost nothing, for no choice of the policy was made there. All when None.

    >>> kl_penalty([np.array([-1.0, -2.0]), np.zeros(0)], [np.array([-1.5, -1.5]), np.zeros(0)], "k1", beta=0.1)
    [array([ 0.05, -0.05]), array([], dtype=float64)]
    """
    samples = zip(logps, ref_logps, _masks(drawn, logps), strict=True)
    return [_only(mask, beta * KLS[estimator](_difference(p, ref))) for p, ref, mask in samples]


def token_rewards(
    rewards: Float[np.ndarray, "B"], penalties: Sequence[PerToken], drawn: Drawn | None = None
) -> list[PerToken]:
    """The reward of each token, one array a sample: −penalty at each token that the policy drew, and at the last of
    them the sample's reward besides (Ouyang et al., 2022). Zeros for a sample that no function scored (NaN), or that
    the policy drew nothing of.

    >>> token_rewards(np.array([1.0, np.nan]), [np.array([0.1, 0.2]), np.array([0.3])])
    [array([-0.1,  0.8]), array([0.])]
    """
    samples = zip(rewards, penalties, _masks(drawn, penalties), strict=True)
    return [_laid(float(reward), penalty, mask) for reward, penalty, mask in samples]


def adapted_beta(beta: float, kl: float, target: float, horizon: int, samples: int) -> float:
    """β for the next step, so that the KL comes to `target`: β·(1 + clip(kl/target − 1, ±0.2)·samples/horizon) (Ziegler
    et al., 2019, section 2.2).

    The deviation: a step of more samples than the horizon counts as one of that many, so that β keeps its sign. A KL
    that is no number (a step without tokens) leaves β as it is.

    Args:
        beta: now.
        kl: the step's mean.
        target: wanted.
        horizon: samples over which β moves.
        samples: of the step.

    >>> round(adapted_beta(0.1, kl=12.0, target=6.0, horizon=10_000, samples=500), 6)
    0.101
    """
    if np.isnan(kl):
        return beta
    error = min(max(kl / target - 1, -STEP_CLIP), STEP_CLIP)
    return beta * (1 + error * min(samples / horizon, 1.0))


def k1(d: PerToken) -> PerToken:
    """−d: unbiased, of either sign (Schulman, 2020). Here and below d = logp_ref − logp."""
    return -d


def k2(d: PerToken) -> PerToken:
    """d²/2: low variance, slightly biased."""
    halved: PerToken = d * d / 2
    return halved


def k3(d: PerToken) -> PerToken:
    """exp(d) − d − 1: unbiased and never negative; d is cut off at `LIMIT`, as in the loss."""
    d = np.minimum(d, LIMIT)
    estimate: PerToken = np.expm1(d) - d
    return estimate


def _difference(logps: PerToken, ref_logps: PerToken) -> PerToken:
    assert len(logps) == len(ref_logps), f"{len(logps)} log-probs and {len(ref_logps)} of the reference"
    return np.asarray(ref_logps, np.float64) - np.asarray(logps, np.float64)


def _laid(reward: float, penalty: PerToken, drawn: Bool[np.ndarray, "n"]) -> PerToken:
    if np.isnan(reward) or not drawn.any():
        return np.zeros(len(penalty))
    out = -_only(drawn, penalty)
    out[np.flatnonzero(drawn)[-1]] += reward
    return out


def _masks(drawn: Drawn | None, arrays: Sequence[PerToken]) -> Drawn:
    return [np.ones(len(a), bool) for a in arrays] if drawn is None else drawn


def _only(mask: Bool[np.ndarray, "n"], values: PerToken) -> PerToken:
    """0 where the mask is False; indexing refuses a mask of another length, which `np.where` would broadcast."""
    out = np.zeros(len(values))
    out[mask] = values[mask]
    return out


KLS: dict[str, Callable[[PerToken], PerToken]] = {"k1": k1, "k2": k2, "k3": k3}
"""Name → estimator on the host; `losses.KLS` has those of the loss."""
