"""Losses as pure functions: log-probs, ratios, surrogates, KL, advantages, values."""
