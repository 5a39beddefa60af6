"""Status of a run: on a terminal, in a notebook, in `heartbeat.json`, and read from its folder by another process."""
