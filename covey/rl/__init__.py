"""The algorithm: pure parts (advantages, losses, rows), workers by role, and the loop."""
