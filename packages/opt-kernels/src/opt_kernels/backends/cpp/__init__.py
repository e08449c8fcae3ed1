"""Sweeps in C++ for CPUs, compiled when they are first needed: one pass over memory for any mix of dtypes.

`compiler` turns sources into a library, `translate` a formula into a source, and `sweep` works into a call. What all
sweeps share is in `elements.h`, what those of formulas share in `codecs.h` and
`update.h`.
"""
