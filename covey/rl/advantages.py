"""How much better an answer was than its group: from rewards [P, G] to advantages [P, G], in float64 on the host."""

import numpy as np
from jaxtyping import Float

EPSILON = 1e-4


def group_zscore(rewards: Float[np.ndarray, "P G"]) -> Float[np.ndarray, "P G"]:
    """(R − mean of the group) / (std of the group + 1e-4), std with ddof 1 (Shao et al., 2024, eq. 3; ε as in TRL).

    Samples that no function scored (NaN) are left out of mean and std and get 0. A group whose rewards are all equal
    gets exactly 0: rounding in the mean must not become a gradient.

    >>> group_zscore(np.array([[1.0, 0.0], [0.5, 0.5]])).round(4).tolist()
    [[0.707, -0.707], [0.0, 0.0]]
    """
    out = np.zeros_like(rewards, dtype=np.float64)
    for row, group in zip(out, rewards, strict=True):
        scored = ~np.isnan(group)
        if informative(group):
            values = group[scored]
            row[scored] = (values - values.mean()) / (values.std(ddof=1) + EPSILON)
    return out


def informative(group: Float[np.ndarray, "G"]) -> bool:
    """True when the rewards of a group differ: only then can it teach anything."""
    scored = group[~np.isnan(group)]
    return scored.size > 1 and bool(scored.min() < scored.max())
