"""The decoder and its families, and where weights come from."""
