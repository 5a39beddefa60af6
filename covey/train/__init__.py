"""Trainer, optimizers and checkpoints."""
