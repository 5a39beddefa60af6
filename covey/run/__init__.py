"""Code of every run, of reinforcement or supervised learning: the loop over steps, its folder, its outputs."""
