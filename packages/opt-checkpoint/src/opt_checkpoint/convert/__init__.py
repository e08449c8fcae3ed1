"""Conversion from and to other formats, in one process."""
