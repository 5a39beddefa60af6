"""Environments of several turns and tools: their protocol, the built-in ones, and how they are run."""
