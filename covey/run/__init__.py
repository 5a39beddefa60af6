"""What every run does, of reinforcement or supervised learning: the loop over steps, its folder, its outputs."""
