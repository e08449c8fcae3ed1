"""Contiguous buffers of parameters and gradients, and when they travel."""
