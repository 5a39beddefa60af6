"""Bases in 8 or 4 bits under adapters (QLoRA)."""
