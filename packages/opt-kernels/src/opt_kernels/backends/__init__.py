"""Sweeps over all elements of a step, in four versions, of which `dispatch` chooses one.

For packages that read gradients without a rule: statistics and memory order; and the numbers of groups that a captured
step reads.
"""

from opt_kernels.backends.dispatch import grad_stats
from opt_kernels.backends.elements import in_memory_order, is_dense, read_main
from opt_kernels.hyper_table import HyperTable

__all__ = ["HyperTable", "grad_stats", "in_memory_order", "is_dense", "read_main"]
