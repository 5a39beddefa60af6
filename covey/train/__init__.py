"""Trainer, optimizers, checkpoints, and the metrics that a run writes and shows."""
