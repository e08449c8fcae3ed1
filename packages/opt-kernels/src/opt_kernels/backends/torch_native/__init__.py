"""Versions made of torch operations, for any device."""
