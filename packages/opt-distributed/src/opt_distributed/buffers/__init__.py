"""Contiguous buffers of parameters and gradients, and when they are reduced and gathered."""
