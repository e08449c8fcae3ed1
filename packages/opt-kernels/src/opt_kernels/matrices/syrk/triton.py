"""Symmetric products as one batched Triton kernel: computes the tiles up to the diagonal and stores each twice.

A tile below the diagonal is stored at its position and, transposed, at its mirror position. This takes half the
multiply-adds of a whole product, plus half a tile per row. Alpha, beta and the added matrix are applied before the
stores. Operands are loaded through tensor descriptors (TMA) if the device and the installed Triton support them, else
through pointers. `kernels/syrk.md` derives the design.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opt_kernels.backends.tables import launching_on
from opt_kernels.backends.triton import HAS_DESCRIPTORS, INTERPRETED, TensorDescriptor, jit, tl
from opt_kernels.backends.triton.lanes import nearest
from opt_kernels.matrices.syrk import dense_product
from opt_kernels.precision import tf32_products

TILE = 128  # rows and columns of a tile: square, so that its mirror image is a tile too
TILE_BYTES_K = 128  # of a row of an operand's tile: one line of a swizzled TMA box
NUM_WARPS = 8  # with 4 the accumulator spills where operands come through pointers
# Published kernels of this kind are slower than a whole product up to 512 rows and faster from 2048 on. This is a guess
# between the two; `kernels/gpu_all.py` measures it.
SMALLEST_ROWS = 1024


@jit
def triangle(index: tl.tensor) -> tl.tensor:
    """The row of tile `index`, where the tiles up to the diagonal are numbered row by row."""
    row = ((tl.sqrt(8.0 * index.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    # The root is approximate: correct it by at most one.
    row = tl.where(row * (row + 1) // 2 > index, row - 1, row)
    return tl.where((row + 1) * (row + 2) // 2 <= index, row + 1, row)


@jit
def multiplied(a: tl.tensor, b: tl.tensor, product: tl.tensor, PRECISION: tl.constexpr) -> tl.tensor:
    """`product` + a b, in float32."""
    if INTERPRETED:
        # The interpreter would multiply bfloat16 operands as integers.
        return product + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, product, input_precision=PRECISION)


@jit
def store_twice(
    product: tl.tensor,  # (TILE, TILE) float32
    out: tl.tensor,  # pointer to this matrix
    added: tl.tensor,  # pointer to this matrix, or None
    row: tl.tensor,
    col: tl.tensor,
    m: tl.tensor,
    alpha: tl.tensor,
    beta: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Write alpha * product + beta * added to the tile (row, col) of `out`, and transposed to (col, row)."""
    rows = row * TILE + tl.arange(0, TILE)
    cols = col * TILE + tl.arange(0, TILE)
    inside = (rows[:, None] < m) & (cols[None, :] < m)
    at = rows[:, None].to(tl.int64) * m + cols[None, :]
    result = alpha * product
    if added is not None:
        result += beta * tl.load(added + at, mask=inside, other=0.0).to(tl.float32)
    tile = nearest(result, out.dtype.element_ty)
    tl.store(out + at, tile, mask=inside)
    if row != col:
        mirrored = cols[:, None].to(tl.int64) * m + rows[None, :]
        tl.store(out + mirrored, tl.trans(tile), mask=(cols[:, None] < m) & (rows[None, :] < m))


@jit
def syrk_pointers(
    left: tl.tensor, right: tl.tensor, added: tl.tensor, out: tl.tensor,
    m: tl.tensor, k: tl.tensor,
    left_batch: tl.tensor, left_row: tl.tensor, left_col: tl.tensor,  # strides, in elements
    right_batch: tl.tensor, right_row: tl.tensor, right_col: tl.tensor,
    alpha: float, beta: float,
    TILE: tl.constexpr, TILE_K: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """One program per tile up to the diagonal and matrix of the batch."""
    row = triangle(tl.program_id(0))
    col = tl.program_id(0) - row * (row + 1) // 2
    batch = tl.program_id(1).to(tl.int64)
    rows = row * TILE + tl.arange(0, TILE)
    cols = col * TILE + tl.arange(0, TILE)
    lanes = tl.arange(0, TILE_K)
    lefts = left + batch * left_batch + rows[:, None].to(tl.int64) * left_row + lanes[None, :] * left_col
    rights = right + batch * right_batch + lanes[:, None] * right_row + cols[None, :].to(tl.int64) * right_col
    product = tl.zeros((TILE, TILE), dtype=tl.float32)
    for start in range(0, k, TILE_K):
        inside = start + lanes < k
        a = tl.load(lefts, mask=(rows[:, None] < m) & inside[None, :], other=0.0)
        b = tl.load(rights, mask=inside[:, None] & (cols[None, :] < m), other=0.0)
        product = multiplied(a, b, product, PRECISION)
        lefts += TILE_K * left_col
        rights += TILE_K * right_row
    matrix = batch * m * m
    store_twice(product, out + matrix, added if added is None else added + matrix, row, col, m, alpha, beta, TILE)


@jit
def syrk_descriptors(
    left: tl.tensor,  # descriptor of (batch, m, k), boxes (1, TILE, TILE_K)
    right: tl.tensor,  # of right.mT, boxes likewise, where TRANSPOSED; else of right (batch, k, m), (1, TILE_K, TILE)
    added: tl.tensor, out: tl.tensor,
    m: tl.tensor, k: tl.tensor,
    alpha: float, beta: float,
    TILE: tl.constexpr, TILE_K: tl.constexpr, TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """One program per tile up to the diagonal and matrix of the batch; descriptors load zeros outside their matrix."""
    row = triangle(tl.program_id(0))
    col = tl.program_id(0) - row * (row + 1) // 2
    batch = tl.program_id(1)
    product = tl.zeros((TILE, TILE), dtype=tl.float32)
    for start in range(0, k, TILE_K):
        a = tl.reshape(left.load([batch, row * TILE, start]), (TILE, TILE_K))
        if TRANSPOSED:
            b = tl.trans(tl.reshape(right.load([batch, col * TILE, start]), (TILE, TILE_K)))
        else:
            b = tl.reshape(right.load([batch, start, col * TILE]), (TILE_K, TILE))
        product = multiplied(a, b, product, PRECISION)
    matrix = batch.to(tl.int64) * m * m
    store_twice(product, out + matrix, added if added is None else added + matrix, row, col, m, alpha, beta, TILE)


def symmetric_product(
    left: Tensor, right: Tensor, *, alpha: float = 1.0, added: Tensor | None = None, beta: float = 0.0
) -> Tensor:
    """Same as `syrk.symmetric_product`.

    Uses the kernel where it is faster, else torch's batched product; the results are equal up to rounding.
    """
    if not halving_pays(left):
        return dense_product(left, right, alpha=alpha, added=added, beta=beta)
    return halved_product(left, right, alpha=alpha, added=added, beta=beta)


def halving_pays(left: Tensor) -> bool:
    """Whether the kernel is faster for `left` (batch, m, k): it needs enough rows, and a dtype for tensor cores.

    float64 has no kernel. Exact float32 products use no tensor cores, and their accumulator does not fit the
    registers.
    """
    if left.shape[-2] < SMALLEST_ROWS:
        return False
    return left.itemsize == 2 or input_precision(left.dtype) == "tf32"


def halved_product(
    left: Tensor, right: Tensor, *, alpha: float = 1.0, added: Tensor | None = None, beta: float = 0.0
) -> Tensor:
    """`symmetric_product` by the kernel for any size, of float32, bfloat16 or float16. Accumulates in float32."""
    batch, m, k = left.shape
    out = left.new_empty(batch, m, m)
    if not out.numel():
        return out
    tile_k = TILE_BYTES_K // left.itemsize
    tiles = -(-m // TILE)
    up_to_diagonal = tiles * (tiles + 1) // 2
    grid = (up_to_diagonal, batch)
    addend = None if added is None else added.contiguous()
    common: dict[str, Any] = {
        "TILE": TILE,
        "TILE_K": tile_k,
        "PRECISION": input_precision(left.dtype),
        "num_warps": NUM_WARPS,
        "enable_fp_fusion": True,
    }
    with launching_on(left.device):
        if through_descriptors(left, right):
            lefts = _boxes(left, TILE, tile_k)
            transposed = right.stride(-1) != 1
            rights = _boxes(right.mT, TILE, tile_k) if transposed else _boxes(right, tile_k, TILE)
            options = common | {"TRANSPOSED": transposed, "num_stages": 4}
            syrk_descriptors[grid](lefts, rights, addend, out, m, k, alpha, beta, **options)
        else:
            strides = (*left.stride(), *right.stride())
            # Tiles in flight: as many as fit the shared memory of consumer GPUs (96 of 99 KiB) or of AMD's (32 of 64).
            stages = 3 if torch.version.hip is None else 2
            syrk_pointers[grid](left, right, addend, out, m, k, *strides, alpha, beta, num_stages=stages, **common)
    return out


def through_descriptors(left: Tensor, right: Tensor) -> bool:
    """Whether both operands can use descriptors: a device with TMA, and contiguous rows aligned to 16 bytes."""
    # 9 is Hopper, 10 data-centre Blackwell; later ones have too little shared memory for four stages.
    if not HAS_DESCRIPTORS:
        return False
    if not INTERPRETED.value:
        if torch.version.hip is not None:
            return False
        major, _ = torch.cuda.get_device_capability(left.device)
        if major not in (9, 10):
            return False
    return _describable(left) and (_describable(right) or _describable(right.mT))


def _describable(matrix: Tensor) -> bool:
    *outer, inner = matrix.stride()
    if inner != 1 or matrix.data_ptr() % 16:
        return False
    return all(stride * matrix.itemsize % 16 == 0 for stride in outer)


def _boxes(matrix: Tensor, rows: int, cols: int) -> object:
    """The descriptor of a matrix that `_describable` accepts."""
    make: Callable[..., object] = TensorDescriptor.from_tensor
    return make(matrix, [1, rows, cols])


def input_precision(dtype: torch.dtype) -> str:
    """The precision of products: torch's current setting for float32 operands, fixed for other dtypes."""
    return "tf32" if dtype is torch.float32 and tf32_products() else "ieee"
