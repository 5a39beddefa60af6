"""The processes in which programs of a model are executed."""
