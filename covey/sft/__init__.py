"""Supervised fine-tuning: the training loop and its batches."""
