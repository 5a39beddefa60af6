"""Reward functions and the code that runs them.

`scoring` calls them by `call`, `registry` has their names, and each other module has the functions of a task. What
`scoring` and `call` define is imported at its first use: to check the name of a function needs no NumPy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from covey.rewards.call import (
        RewardFn,
        RewardFns,
        check_columns,
        check_evaluation_columns,
        environment_reward,
        function_names,
        resolve_reward_fns,
    )
    from covey.rewards.scoring import RewardRunner, Scorer, score

__all__ = [
    "RewardFn",
    "RewardFns",
    "RewardRunner",
    "Scorer",
    "check_columns",
    "check_evaluation_columns",
    "environment_reward",
    "function_names",
    "resolve_reward_fns",
    "score",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'covey.rewards' has no attribute {name!r}")
    home = "scoring" if name in ("RewardRunner", "Scorer", "score") else "call"
    return getattr(import_module(f"covey.rewards.{home}"), name)
