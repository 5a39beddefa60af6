"""Settings: their schema, recipes, and how both are read."""
