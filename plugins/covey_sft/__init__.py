"""Supervised fine-tuning: learner, batches, and runs by a recipe."""
