"""Reward functions and the code that runs them.

`scoring` calls them by `call`, `registry` has their names, and each other module has the functions of a task.
"""
