"""Run reward functions in separate processes."""
