"""The optimizer configuration of large-model training, checked when it is built."""

__version__ = "0.1.0"
