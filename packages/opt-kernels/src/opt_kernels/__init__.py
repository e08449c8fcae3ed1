"""Optimizer rules and the fused sweeps that run them, on GPU and CPU."""

from opt_kernels.backends.cpp import fork as fork  # imported before anything forks

__version__ = "0.1.0"
