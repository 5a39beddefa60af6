"""Checks whether a trainer computes the equations that it claims: Covey, TRL, Tunix, or anybody's own.

`checks` holds the equations and invariances, `oracle` the dense float64 model that they are compared with, `trainers`
the processes in which trainers answer, and `results` the table. An adapter (`adapters`) is one file of functions.
"""
