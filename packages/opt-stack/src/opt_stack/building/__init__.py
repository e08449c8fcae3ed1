"""Builds the optimizer that a plan describes."""
