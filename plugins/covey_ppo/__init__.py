"""PPO: an algorithm with a critic, offered by the entry point `covey.algorithms`."""
