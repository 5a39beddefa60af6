"""Adapters: one file for each trainer, executed by the Python of that trainer's environment."""
