"""Sweeps in C++ for CPUs, compiled when they are first needed: one pass over memory for any mix of dtypes.

`compiler` turns sources into a library, `sweep` turns works into a call of it. What an element goes through is in
`ops/<op>/<op>.cpp`; what all sweeps share is in `elements.h`.
"""
