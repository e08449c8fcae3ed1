"""One optimizer step over any layout: replicated, ZeRO-1, layer-wise."""

__version__ = "0.1.0"
