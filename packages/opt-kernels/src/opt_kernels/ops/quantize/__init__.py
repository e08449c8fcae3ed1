"""Narrow states in a sweep: the codecs of `opt_kernels.codecs` as device functions."""
