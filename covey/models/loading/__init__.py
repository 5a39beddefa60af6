"""Checkpoints of other projects, read into decoders."""
