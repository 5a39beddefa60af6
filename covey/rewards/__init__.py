"""Reward functions, and what runs them."""

from covey.rewards.scoring import REWARDS, RewardFn, function_names, resolve, score

__all__ = ["REWARDS", "RewardFn", "function_names", "resolve", "score"]
