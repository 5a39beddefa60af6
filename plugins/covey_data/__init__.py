"""Data sets beside JSON Lines: other formats of files, two hubs, and duplicates among rows."""
