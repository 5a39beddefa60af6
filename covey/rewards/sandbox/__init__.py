"""Reward functions in processes of their own."""
