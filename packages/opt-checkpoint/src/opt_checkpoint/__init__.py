"""Sharded optimizer state that reloads on any number of ranks."""

__version__ = "0.1.0"
