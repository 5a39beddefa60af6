"""The same GRPO step through Covey and through its peers, taken in turn. Run it with `python -m benchmarks.peers`."""
