"""The decoder and its families, and the loading and export of weights."""
