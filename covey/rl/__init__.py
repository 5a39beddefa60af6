"""Training loop of GRPO and PPO, with workers by role."""
