"""Parameter groups by key, the same on every rank."""

__version__ = "0.1.0"
