"""Statistics of gradients in one C++ pass over memory, for float32 and bfloat16. Other dtypes use torch."""

from array import array
from collections.abc import Sequence
from ctypes import CDLL
from operator import attrgetter
from pathlib import Path

import torch
from torch import Tensor

from opt_kernels.backends import reference, torch_native
from opt_kernels.backends.cpp.compiler import attempt
from opt_kernels.backends.cpp.threads import run
from opt_kernels.backends.cpp.update import C_TYPES
from opt_kernels.backends.elements import in_memory_order
from opt_kernels.backends.reference import GradStats, check_norm_type
from opt_kernels.backends.torch_native import is_safe

_DTYPE = attrgetter("dtype")
SOURCE = Path(__file__).with_name("grad_stats.cpp")
ROW_NUMEL = 1 << 12  # as in grad_stats.cpp
SHARE_ROWS = 1 << 4  # minimum work of a thread


@torch.no_grad()
def grad_stats(grads: Sequence[Tensor], *, count_zeros: bool = True, norm_type: float = 2.0) -> GradStats:
    """Same as `reference.grad_stats`, with a relative error of the sum of squares of 2e-6.

    Uses `torch_native` for gradients that no sweep supports.
    """
    check_norm_type(norm_type)
    if norm_type != 2.0:
        return reference.grad_stats(grads, count_zeros=count_zeros, norm_type=norm_type)
    by_dtype = {dtype: list(grads) for dtype in set(map(_DTYPE, grads))}
    if len(by_dtype) > 1:
        by_dtype = {dtype: [grad for grad in grads if grad.dtype is dtype] for dtype in by_dtype}
    compiled = {dtype: _compiled(dtype, count_zeros=count_zeros) for dtype in by_dtype}
    others = [grad for dtype, same in by_dtype.items() if compiled[dtype] is None for grad in same]
    of_others = torch_native.grad_stats(others, count_zeros=count_zeros)
    total = float(of_others.sum_of_squares)
    zeros = int(of_others.zeros)
    for dtype in C_TYPES:
        sweep = compiled.get(dtype)
        same = by_dtype.get(dtype, [])
        if sweep is not None and any(map(Tensor.numel, same)):
            dense = same if all(map(Tensor.is_contiguous, same)) else [in_memory_order(grad) for grad in same]
            of_dtype, zeros_of_dtype = _sums(sweep, dense)
            if not is_safe(of_dtype):
                return reference.grad_stats(grads, count_zeros=count_zeros)
            total = total + of_dtype
            zeros = zeros + zeros_of_dtype
    sum_of_squares = torch.tensor(total, dtype=torch.float64, device="cpu")
    num_zeros = torch.tensor(zeros, dtype=torch.int64, device="cpu")
    return GradStats(sum_of_squares, of_others.nonfinite, num_zeros)


def _compiled(dtype: torch.dtype, *, count_zeros: bool) -> CDLL | None:
    """The sweep for gradients of `dtype`, or None."""
    return attempt(SOURCE, GRAD=C_TYPES[dtype], COUNT_ZEROS=int(count_zeros)) if dtype in C_TYPES else None


def _sums(compiled: CDLL, grads: Sequence[Tensor]) -> tuple[float, int]:
    """The sum of squares and the number of zeros of gradients of one dtype without holes in their memory."""
    numels = list(map(Tensor.numel, grads))
    table = array("q", list(map(Tensor.data_ptr, grads)) + numels)
    row_sums = torch.empty(sum([-(-numel // ROW_NUMEL) for numel in numels]), dtype=torch.float64, device="cpu")
    zeros = run(
        compiled,
        table=table.buffer_info()[0],
        num_runs=len(grads),
        extra=row_sums.data_ptr(),
        total=row_sums.numel(),
        least=SHARE_ROWS,
    )
    # Summed in order, so that the bits do not depend on the number of threads.
    return float(row_sums.cumsum(0)[-1]), zeros
