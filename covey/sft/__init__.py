"""Supervised training: its loop and its batches."""
