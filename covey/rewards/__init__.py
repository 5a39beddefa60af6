"""Reward functions and the code that runs them.

`scoring` calls them by `call`, `registry` has their names, `completions` reads their input; each other module has the
functions of a task.
"""
