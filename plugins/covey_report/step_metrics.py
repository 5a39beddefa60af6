"""Metrics of a step about its rewards: their noise, and what they go with. They are offered by `covey.metrics`."""

from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from covey.config.metrics import OVERLONG
from covey_report.correlation import centre, correlate, labels_of

if TYPE_CHECKING:
    from covey.rl.step_data import GroupTable  # needs JAX

MIN_EQUAL = 8
"""Smallest number of completions, beyond the first of their tokens, from which the noise of rewards is measured."""


def reward_metrics(table: "GroupTable") -> dict[str, float]:
    """Compute the metrics of the rewards of a step."""
    return noise_metrics(table) | correlation_metrics(table)


def noise_metrics(table: "GroupTable") -> dict[str, float]:
    """Compute the variance of the rewards of completions with equal tokens as a share of the variance within groups;
    nothing where fewer than `MIN_EQUAL` completions say so.
    """
    scored, groups = ~np.isnan(table.rewards), np.repeat(np.arange(len(table)), table.sizes)
    variances = []
    for labels in (groups, groups * table.sizes.max(initial=1) + table.first_equal):
        freedom = scored.sum() - np.unique(labels[scored]).size
        variances.append((centre(table.rewards, labels) ** 2).sum() / freedom if freedom >= MIN_EQUAL else np.nan)
    within, of_equal = variances
    return {"reward_noise": float(of_equal / within)} if within > 0 and not np.isnan(of_equal) else {}


def correlation_metrics(table: "GroupTable") -> dict[str, float]:
    """Compute the correlations of the rewards of a step with length in characters, emptiness and repetition, those of
    each two reward functions, of which the length penalty is none, and the fraction of empty ones among the completions
    with a reward above the mean of their group. One that is undefined is left out.
    """
    empty = table.empty.astype(float)
    texts = {"length": table.characters, "empty": empty, "repetition": table.repetition}
    pairs = {f"reward_correlation/{name}": (table.rewards, values) for name, values in texts.items()}
    scored = {name: values for name, values in table.by_function.items() if name != OVERLONG}
    for (first, a), (second, b) in combinations(scored.items(), 2):
        pairs[f"rewards/{first}/correlation/{second}"] = a, b
    labels = labels_of(table.sizes)
    correlations = {name: correlate(*pair, labels) for name, pair in pairs.items()}
    rewarded = empty[centre(table.rewards, labels) > 0]
    return {
        **({"completions/rewarded_empty_ratio": float(rewarded.mean())} if rewarded.size else {}),
        **{name: correlation for name, correlation in correlations.items() if correlation is not None},
    }
