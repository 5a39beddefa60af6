"""Processes of their own for code that a run does not trust: reward functions, chat templates, programs of a model."""
