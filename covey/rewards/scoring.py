"""Score groups: call the reward functions, weight their values and assign them to the groups.

`call` defines what a function receives and may return; `runner` handles its failures.
"""

from collections.abc import MutableMapping, Sequence
from dataclasses import replace

import numpy as np

from covey.errors import RecipeError
from covey.losses.advantages import merge_ties
from covey.rewards.call import RewardFns, function_names, resolve_reward_fns
from covey.rewards.runner import RewardRunner
from covey.types import Group


def score(
    groups: Sequence[Group],
    reward_fns: RewardFns,
    weights: Sequence[float] | None = None,
    runner: RewardRunner | None = None,
    failed: MutableMapping[str, int] | None = None,
) -> list[Group]:
    """Return the groups with `rewards` and `rewards_by_function` filled in.

    Args:
        groups: completions of any number of prompts; the functions see all of them in one call.
        reward_fns: one or more functions, or names that `resolve` accepts.
        weights: factor of each function in the total; all 1 by default. A function of weight 0 is called and
            listed, but affects neither the sum nor whether a completion counts as scored. What a function with the
            attribute `is_needed` does not score is not scored, whatever others say: an environment's reward has it.
        runner: decides where functions run and how failures are handled; by default in this process, raising an error.
        failed: receives the number of failures that the runner tolerated, by function.

    Raises:
        RecipeError: no function, an unknown name, or weights that do not fit the functions.
        RewardError: a function requires a missing column, raises, or returns anything but one finite number or None
            for each completion, and the runner has no other policy for it.
    """
    functions = resolve_reward_fns(reward_fns)
    factors = _check_weights(weights, len(functions))
    if not groups:
        return []
    samples = [(group, completion) for group in groups for completion in group.completions]
    names = function_names(functions)
    table = (runner or RewardRunner()).run(dict(zip(names, functions, strict=True)), samples, failed)
    scored = ~np.isnan(table) & (factors != 0)[:, None]
    needed = np.array([getattr(function, "is_needed", False) for function in functions]) & (factors != 0)
    summands = np.where(scored, table * factors[:, None], 0.0)
    totals, sizes = summands.sum(axis=0), np.abs(summands).sum(axis=0)
    totals[~scored.any(axis=0) | ~scored[needed].all(axis=0)] = np.nan
    return _split(groups, names, table, totals, sizes)


def _check_weights(weights: Sequence[float] | None, count: int) -> np.ndarray:
    if not count:
        raise RecipeError("no reward function", want="at least one", fix="name one in rewards", where="rewards")
    factors = np.ones(count) if weights is None else np.asarray(weights, dtype=np.float64)
    if factors.shape != (count,) or not np.isfinite(factors).all():
        raise RecipeError(
            f"the weights {factors.tolist()} for {count} reward functions",
            want=f"{count} finite numbers",
            fix="one for each function",
            where="grpo.reward_weights",
        )
    if not factors.any():
        raise RecipeError(
            "the reward weights are all 0: no answer would be scored",
            want="one that is not 0",
            where="grpo.reward_weights",
        )
    return factors


def _split(
    groups: Sequence[Group], names: Sequence[str], table: np.ndarray, totals: np.ndarray, sizes: np.ndarray
) -> list[Group]:
    cuts = np.cumsum([len(group.completions) for group in groups])[:-1]
    parts = zip(groups, *(np.split(values, cuts, axis=-1) for values in (totals, sizes, table)), strict=True)
    return [
        replace(group, rewards=merge_ties(total, size), rewards_by_function=dict(zip(names, part, strict=True)))
        for group, total, size, part in parts
    ]
