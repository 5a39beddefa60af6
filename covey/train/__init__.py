"""Optimizers, checkpoints, and what a run writes and shows."""
