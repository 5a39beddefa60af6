"""Compiled programs, read before they run: their collectives, loops and buffers."""
