"""Monitor of a run: the record of its steps, the files that it writes, its status and the displays of it."""
