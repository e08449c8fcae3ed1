"""Sweeps in C++ for CPUs, compiled at their first use: one pass over memory for any mix of dtypes.

`translate` generates the source of a formula, `compiler` builds a library from a source, and `update` calls the library
for a batch of works. `elements.h` has the code common to all sweeps, `formats.h` and `update.h` that of formulas, and
`codecs.h`, `narrow.h` and `integers.h` the codecs of states. `chunks` arranges the loops over states with codecs.
"""
