"""Sums over the elements of one work that the hooks' factors are made of; they add up over the parts of a parameter."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from opt_kernels.backends.elements import flat, in_memory_order
from opt_kernels.codecs import remainder
from opt_kernels.works import Work

NUM_SUMS = 5
ROW = 1 << 12  # elements that float32 sums before float64 takes over: its rounding does not grow with the parameter
PIECE_NUMEL = 1 << 22  # elements of which temporaries are made


class Sums(NamedTuple):
    """Columns of the sums of works, (n,) float64 each."""

    numel: Tensor
    kept: Tensor  # elements that a mask left
    u_squares: Tensor  # |u|^2
    p_squares: Tensor  # |p|^2
    products: Tensor  # <p, u>


def sums_of(works: Sequence[Work], updates: Sequence[Tensor], masked: Sequence[Tensor] | None) -> Tensor:
    """(len(works), NUM_SUMS) float64, on the device of the updates; columns as in `Sums`.

    Args:
        works: their mains are read.
        updates: u of each, in the main's shape and order of memory.
        masked: for each the number of elements that a mask left, 0-d.
    """
    device = updates[0].device if updates else torch.device("cpu")
    sums = torch.zeros(len(works), NUM_SUMS, dtype=torch.float64, device=device)
    for row, work, update in zip(sums, works, updates):
        row[0] = update.numel()
        for u, p in _pieces(work, update):
            row[2] += _product(u, u)
            row[3] += _product(p, p)
            row[4] += _product(p, u)
    if masked is not None:
        sums[:, 1] = torch.stack([*masked]).double() if masked else 0.0
    return sums


def columns(sums: Tensor) -> Sums:
    """The columns of `sums` (n, NUM_SUMS)."""
    return Sums(*sums.unbind(1))


def _pieces(work: Work, update: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Update and main, flat and in the update's dtype, piece by piece."""
    u = in_memory_order(update)
    anchor = work.main if work.main is not None else work.out
    assert anchor is not None
    p = flat(anchor, anchor, "main")
    lower = None if work.remainder is None else flat(work.remainder, anchor, "remainder")
    for begin in range(0, u.numel(), PIECE_NUMEL):
        piece = slice(begin, begin + PIECE_NUMEL)
        main = p[piece] if lower is None else remainder.join(p[piece], lower[piece])
        yield u[piece], main.to(u.dtype)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """<a, b> of (n,), 0-d float64."""
    rows = a.numel() // ROW * ROW
    return _row_products(a[:rows].view(-1, ROW), b[:rows].view(-1, ROW)) + _row_products(a[rows:], b[rows:])


def _row_products(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1).double().sum()
