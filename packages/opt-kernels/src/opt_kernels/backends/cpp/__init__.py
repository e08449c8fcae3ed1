"""Sweeps in C++ for CPUs, compiled at their first use: one pass over memory for any mix of dtypes.

`compiler` turns sources into a library, `translate` a formula into a source, and `sweep` works into a call. Code
common to all sweeps is in `elements.h`, code common to those of formulas in `codecs.h` and `update.h`.
"""
