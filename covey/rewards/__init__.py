"""Reward functions, and what runs them."""

from covey.rewards.calling import RewardFn
from covey.rewards.runner import RewardRunner
from covey.rewards.scoring import REWARDS, function_names, resolve, score

__all__ = ["REWARDS", "RewardFn", "RewardRunner", "function_names", "resolve", "score"]
