"""Optimizer rules and the fused sweeps that run them, on GPU and CPU."""

__version__ = "0.1.0"
