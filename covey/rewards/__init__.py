"""Reward functions and the code that runs them."""

from covey.rewards.call import RewardFn
from covey.rewards.episode import environment_reward
from covey.rewards.registry import REWARDS, resolve
from covey.rewards.sandbox.runner import RewardRunner
from covey.rewards.score import check_columns, function_names, score

__all__ = [
    "REWARDS",
    "RewardFn",
    "RewardRunner",
    "check_columns",
    "environment_reward",
    "function_names",
    "resolve",
    "score",
]
