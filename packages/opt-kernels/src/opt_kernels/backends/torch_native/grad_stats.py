"""The statistics of gradients at the speed of memory, with torch's own reductions."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from opt_kernels.backends.elements import in_memory_order
from opt_kernels.backends.reference import grad_stats as reference
from opt_kernels.backends.reference.grad_stats import GradStats, check_norm_type

# Each row is summed by one thread in float32, the rows in float64: the same bits whatever the number of threads.
ROW_NUMEL = 1 << 12
# 4 MiB of float32: the second pass over a tile finds it in the cache.
TILE_NUMEL = 1 << 20
# Below it, to start a norm costs more than to copy the tensor to where others share one.
SMALL_NUMEL = 1 << 14
# Between these no float32 square that matters was lost to overflow or underflow.
SMALLEST_SAFE, LARGEST_SAFE = 1e-24, 1e36


@torch.no_grad()
def grad_stats(grads: Sequence[Tensor], *, count_zeros: bool = True, norm_type: float = 2.0) -> GradStats:
    """What `reference.grad_stats` gives, the sum of squares to 2e-6 of itself.

    A finite sum of squares has no non-finite term, so elements are looked at one by one only where the sum is not
    finite; or so small that squares may have vanished. That look reads the sum on the host.
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
    """Whether no float32 square can have been lost to overflow or underflow, nor any element not finite."""
    return SMALLEST_SAFE < sum_of_squares < LARGEST_SAFE


def _pieces(grads: Sequence[Tensor]) -> list[Tensor]:
    """Pieces of at most a tile. Small float32 ones keep their shape: to flatten each costs more than its share of a
    norm. Others are flat."""
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
    """Float64 and large float32 pieces as they are; others packed into a float32 tile, which the next overwrites."""
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
    """The pieces one after another, in `row` or, where nothing is converted, in a new tensor."""
    if all(piece.dtype is torch.float32 for piece in pieces):
        flat: Tensor = _flatten_dense_tensors(pieces)  # type: ignore[no-untyped-call]
        return flat
    parts = torch.split(row, [piece.numel() for piece in pieces])
    torch._foreach_copy_(list(parts), [piece.reshape(-1) for piece in pieces])
    return row


def _norms(tile: Tensor) -> list[Tensor]:
    """The norms of the rows of `tile` (n,), and of what is left: (rows,) and (1,)."""
    full = tile.numel() // ROW_NUMEL * ROW_NUMEL
    norms = [torch.linalg.vector_norm(tile[:full].view(-1, ROW_NUMEL), dim=1)] if full else []
    if full < tile.numel():
        norms.append(torch.linalg.vector_norm(tile[full:], dim=0, keepdim=True))
    return norms
