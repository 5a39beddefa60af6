"""Comparison of the same GRPO step in Covey and in its peers, which take turns. Run it with `python -m
benchmarks.peers`.
"""
