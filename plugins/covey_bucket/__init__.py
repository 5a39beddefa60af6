"""Checkpoints of a run in a Cloud Storage bucket."""
