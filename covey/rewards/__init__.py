"""Reward functions, and what runs them."""

from covey.rewards.calling import RewardFn
from covey.rewards.runner import RewardRunner
from covey.rewards.scoring import REWARDS, check_columns, function_names, resolve, score

__all__ = ["REWARDS", "RewardFn", "RewardRunner", "check_columns", "function_names", "resolve", "score"]
