"""Benchmarks of Covey: variants of one piece of work, timed side by side. Run it with `python -m benchmarks`."""
