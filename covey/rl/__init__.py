"""Training loop of reinforcement learning with workers by role, and GRPO."""
