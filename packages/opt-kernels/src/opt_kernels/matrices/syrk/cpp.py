"""Symmetric products in C++ for bfloat16, on processors with bfloat16 instructions. Other products use torch.

They take a little more than half of the multiplications, at the speed of torch's matrix products.
"""

from array import array
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from opt_kernels.backends.cpp.compiler import attempt, library
from opt_kernels.backends.cpp.threads import run
from opt_kernels.matrices import syrk

SOURCE = Path(__file__).with_name("syrk.cpp")
# Of a tile, as in syrk.cpp.
ROWS = 8
COLS = 32
PACK = 0
MULTIPLY = 1
LEAST = 1 << 21  # number of multiplications below which two calls cost more than they save
LEAST_TILES = 8  # number of multiplications that are worth another thread


def symmetric_product(
    left: Tensor, right: Tensor, *, alpha: float = 1.0, added: Tensor | None = None, beta: float = 0.0
) -> Tensor:
    """Same as `syrk.symmetric_product`, by the compiled product where that is faster.

    Summed in float32 and rounded once; subnormal bfloat16 numbers count as zero. The result is exactly symmetric except
    within blocks of 32 on the diagonal.
    """
    if not takes(left, right, added):
        return syrk.symmetric_product(left, right, alpha=alpha, added=added, beta=beta)
    batch, m, k = left.shape
    out = left.new_empty(batch, m, m)
    packed = torch.empty(m * k // 2, dtype=torch.int32, device="cpu")
    scalars = array("f", (alpha, beta))
    blocks = m // COLS
    tiles = sum(m // ROWS - block * (COLS // ROWS) for block in range(blocks))
    added_row = 0 if added is None else added.stride(-2)
    strides = (left.stride(-2), *right.stride()[-2:], added_row)
    for i in range(batch):
        given = (left[i], right[i], None if added is None else added[i], out[i], packed)
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in given]
        for phase, total, least in ((PACK, blocks, 1), (MULTIPLY, tiles, LEAST_TILES)):
            product = array("q", [phase, *addresses, m, k, *strides])  # `struct Product`
            run(
                library(SOURCE),
                table=product.buffer_info()[0],
                num_runs=1,
                extra=scalars.buffer_info()[0],
                total=total,
                least=least,
            )
    return out


def takes(left: Tensor, right: Tensor, added: Tensor | None) -> bool:
    """Whether the compiled product supports these tensors and is faster."""
    m, k = left.shape[-2:]
    given = [left, right] if added is None else [left, right, added]
    if not all(tensor.dtype is torch.bfloat16 and tensor.is_cpu for tensor in given):
        return False
    if m % COLS or k % 2 or m * m * k < LEAST:
        return False
    if left.stride(-1) != 1 or 1 not in right.stride()[-2:]:
        return False
    if added is not None and added.stride(-1) != 1:
        return False
    return _is_supported()


@cache
def _is_supported() -> bool:
    compiled = attempt(SOURCE)
    return compiled is not None and bool(compiled.supported())
