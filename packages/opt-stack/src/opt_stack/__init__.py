"""The optimizer stack for large models: get_optimizer and its plan."""

__version__ = "0.1.0"
