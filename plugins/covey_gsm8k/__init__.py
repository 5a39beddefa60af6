"""GSM8K: the task with its reward functions."""
