"""The statistics of gradients at the speed of memory, with torch's own reductions."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from opt_kernels.ops.grad_stats import reference
from opt_kernels.ops.grad_stats.reference import GradStats, check_norm_type

# Each row is summed by one thread in float32, the rows in float64: the same bits whatever the number of threads.
ROW_NUMEL = 1 << 14
# 4 MiB of float32: the second pass over a tile finds it in the cache.
TILE_NUMEL = 1 << 20
# Between these no float32 square that matters was lost to overflow or underflow.
SMALLEST_SAFE, LARGEST_SAFE = 1e-24, 1e36


def grad_stats(grads: Sequence[Tensor], *, count_zeros: bool = True, norm_type: float = 2.0) -> GradStats:
    """What `reference.grad_stats` gives, the sum of squares to about 1e-6 of itself.

    A finite sum of squares has no non-finite term, so elements are looked at one by one only where the sum is not
    finite; or so small that squares may have vanished. That look reads the sum on the host.
    """
    check_norm_type(norm_type)
    if norm_type != 2.0 or not grads:
        return _exact(grads, count_zeros=count_zeros, norm_type=norm_type)
    partials = [_partials(tile, count_zeros) for tile in _tiles(grads)]
    total = torch.cat([partial.row_norms for partial in partials]).double().square().sum()
    if not SMALLEST_SAFE < float(total) < LARGEST_SAFE:
        return _exact(grads, count_zeros=count_zeros, norm_type=norm_type)
    nowhere = torch.zeros((), dtype=torch.int64, device=total.device)
    zeros = torch.stack([partial.zeros for partial in partials]).sum() if count_zeros else nowhere
    return GradStats(sum_of_squares=total, nonfinite=nowhere, zeros=zeros)


class _Partials(NamedTuple):
    row_norms: Tensor  # (rows,) float32 or float64
    zeros: Tensor  # 0-d int64


def _exact(grads: Sequence[Tensor], *, count_zeros: bool, norm_type: float) -> GradStats:
    """By the reference, a tile at a time: its float64 copies stay small."""
    pieces = [piece for grad in grads for piece in torch.split(grad.reshape(-1), TILE_NUMEL)]
    return reference.grad_stats(pieces, count_zeros=count_zeros, norm_type=norm_type)


def _tiles(grads: Sequence[Tensor]) -> Iterator[Tensor]:
    """Pieces of every gradient, float32 or float64; scratch that the next piece overwrites where it was narrower."""
    wide: Tensor | None = None
    for grad in grads:
        for piece in torch.split(grad.detach().reshape(-1), TILE_NUMEL):
            if piece.dtype in (torch.float32, torch.float64):
                yield piece
                continue
            if wide is None:
                wide = torch.empty(TILE_NUMEL, dtype=torch.float32, device=piece.device)
            yield wide[: piece.numel()].copy_(piece)


def _partials(tile: Tensor, count_zeros: bool) -> _Partials:
    rows = tile.numel() // ROW_NUMEL
    norms = torch.linalg.vector_norm(tile[: rows * ROW_NUMEL].view(rows, ROW_NUMEL), dim=1)
    rest = tile[rows * ROW_NUMEL :]
    if rest.numel():
        norms = torch.cat([norms, torch.linalg.vector_norm(rest).view(1)])
    zeros = tile.numel() - torch.count_nonzero(tile) if count_zeros else norms.new_zeros((), dtype=torch.int64)
    return _Partials(norms, zeros)
