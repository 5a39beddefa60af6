"""Formats of models besides Hugging Face's, and the commands that write, publish and list models."""
