"""Reward functions and the code that runs them.

Each name is imported at its first use: to check the name of a reward function needs no NumPy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from covey.rewards.call import (
        RewardFn,
        RewardFns,
        check_columns,
        check_evaluation_columns,
        function_names,
        no_reward_error,
        only_one,
        resolve_reward_fns,
    )
    from covey.rewards.registry import REWARDS, environment_reward, resolve
    from covey.rewards.runner import RewardRunner
    from covey.rewards.scoring import score

__all__ = [
    "REWARDS",
    "RewardFn",
    "RewardFns",
    "RewardRunner",
    "check_columns",
    "check_evaluation_columns",
    "environment_reward",
    "function_names",
    "no_reward_error",
    "only_one",
    "resolve",
    "resolve_reward_fns",
    "score",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'covey.rewards' has no attribute {name!r}")
    return getattr(import_module(f"covey.rewards.{_HOMES[name]}"), name)


_HOMES = {
    "REWARDS": "registry",
    "RewardFns": "call",
    "no_reward_error": "call",
    "only_one": "call",
    "resolve_reward_fns": "call",
    "RewardFn": "call",
    "RewardRunner": "runner",
    "check_columns": "call",
    "check_evaluation_columns": "call",
    "environment_reward": "registry",
    "function_names": "call",
    "resolve": "registry",
    "score": "scoring",
}
"""Map from name to the module that defines it."""
