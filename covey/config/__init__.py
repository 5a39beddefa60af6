"""Settings: their schema, recipes, and the readers of both."""
