"""Torch's own operations, on any device."""
