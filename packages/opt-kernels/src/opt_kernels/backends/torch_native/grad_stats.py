"""Gradient statistics with torch's reductions, limited by memory bandwidth."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from opt_kernels.backends.elements import in_memory_order
from opt_kernels.backends.reference import grad_stats as reference
from opt_kernels.backends.reference.grad_stats import GradStats, check_norm_type

# One thread sums a row in float32, and rows are summed in float64: the same bits for any number of threads.
ROW_NUMEL = 1 << 12
# 4 MiB of float32: small enough that the second pass over a tile reads it from the cache.
TILE_NUMEL = 1 << 20
# Smaller tensors share a tile: copying one takes less time than starting a norm for it.
SMALL_NUMEL = 1 << 14
# Between these bounds, no float32 square that affects the sum has overflowed or underflowed.
SMALLEST_SAFE, LARGEST_SAFE = 1e-24, 1e36


@torch.no_grad()
def grad_stats(grads: Sequence[Tensor], *, count_zeros: bool = True, norm_type: float = 2.0) -> GradStats:
    """Same as `reference.grad_stats`, with a relative error of the sum of squares of 2e-6.

    If the sum of squares is finite, all elements are finite. Single elements are therefore checked only if the sum is
    not finite, or so small that squares may have underflowed. For this the sum is read on the host.
    """
    check_norm_type(norm_type)
    pieces = _pieces(grads)
    if norm_type != 2.0 or not pieces:
        return reference.grad_stats(grads, count_zeros=count_zeros, norm_type=norm_type)
    norms, zeros = [], []
    for tile in _tiles(pieces):
        norms += _norms(tile)
        if count_zeros:
            zeros.append(tile.numel() - torch.count_nonzero(tile))
    total = torch.cat(norms).double().square().sum()
    if not is_safe(float(total)):
        return reference.grad_stats(pieces, count_zeros=count_zeros, norm_type=norm_type)
    none = torch.zeros((), dtype=torch.int64, device=total.device)
    return GradStats(sum_of_squares=total, nonfinite=none, zeros=torch.stack(zeros).sum() if zeros else none)


def is_safe(sum_of_squares: float) -> bool:
    """Whether every element is finite and no float32 square that affects the sum has overflowed or underflowed."""
    return SMALLEST_SAFE < sum_of_squares < LARGEST_SAFE


def _pieces(grads: Sequence[Tensor]) -> list[Tensor]:
    """The gradients in pieces of at most a tile. Small float32 gradients keep their shape, because flattening one takes
    longer than its share of a norm. Other pieces are flat."""
    pieces: list[Tensor] = []
    for grad in grads:
        numel = grad.numel()
        if not numel:
            continue
        if numel <= SMALL_NUMEL and grad.dtype is torch.float32:
            pieces.append(grad)
        elif numel <= TILE_NUMEL:
            pieces.append(in_memory_order(grad))
        else:
            pieces += torch.split(in_memory_order(grad), TILE_NUMEL)
    return pieces


def _tiles(pieces: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield float64 and large float32 pieces unchanged, and the others packed into float32 tiles. Packed tiles share
    memory: each overwrites the previous one."""
    packed: list[Tensor] = []
    numel, row = 0, torch.empty(0)
    for piece in pieces:
        length = piece.numel()
        if piece.dtype is torch.float64 or (piece.dtype is torch.float32 and length > SMALL_NUMEL):
            yield piece
            continue
        if numel + length > TILE_NUMEL:
            row = row if row.numel() else torch.empty(TILE_NUMEL, dtype=torch.float32, device=piece.device)
            yield _packed(packed, row[:numel])
            packed, numel = [], 0
        packed.append(piece)
        numel += length
    if packed:
        row = row if row.numel() else torch.empty(numel, dtype=torch.float32, device=packed[0].device)
        yield _packed(packed, row[:numel])


def _packed(pieces: list[Tensor], row: Tensor) -> Tensor:
    """The pieces concatenated in float32: in `row` if any is converted, else in a new tensor."""
    if all(piece.dtype is torch.float32 for piece in pieces):
        flat: Tensor = _flatten_dense_tensors(pieces)  # type: ignore[no-untyped-call]
        return flat
    parts = torch.split(row, [piece.numel() for piece in pieces])
    torch._foreach_copy_(list(parts), [piece.reshape(-1) for piece in pieces])
    return row


def _norms(tile: Tensor) -> list[Tensor]:
    """The norms of the full rows of `tile` (n,), shape (rows,), and of the remaining elements, shape (1,)."""
    full = tile.numel() // ROW_NUMEL * ROW_NUMEL
    norms = [torch.linalg.vector_norm(tile[:full].view(-1, ROW_NUMEL), dim=1)] if full else []
    if full < tile.numel():
        norms.append(torch.linalg.vector_norm(tile[full:], dim=0, keepdim=True))
    return norms
