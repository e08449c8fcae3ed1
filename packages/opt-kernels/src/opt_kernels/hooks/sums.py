"""Sums over the elements of a work, from which factors follow. The sums of all parts of a parameter are added."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from opt_kernels.backends.elements import flat, in_memory_order
from opt_kernels.codecs import remainder
from opt_kernels.works import Work

ROW = 1 << 12  # elements summed in float32 before float64 takes over, so that rounding does not grow with the parameter
PIECE_NUMEL = 1 << 22  # elements per temporary


class Sums(NamedTuple):
    """Columns of the sums of works, (n,) float64 each. Columns that are not needed are zero."""

    numel: Tensor
    kept: Tensor  # elements that a mask kept
    u_squares: Tensor  # |u|^2
    p_squares: Tensor  # |p|^2
    products: Tensor  # <p, u>


NUM_SUMS = len(Sums._fields)


def sums_of(works: Sequence[Work], updates: Sequence[Tensor], needed: Collection[str]) -> Tensor:
    """(len(works), NUM_SUMS) float64 on the device of the updates, with the columns of these names and `numel`.

    `updates` are the u of each work, in its main's shape and order of memory. `kept` is not computed here.
    """
    device = updates[0].device if updates else torch.device("cpu")
    found = torch.zeros(len(works), NUM_SUMS, dtype=torch.float64, device=device)
    for row, work, update in zip(map(Sums._make, found.unbind()), works, updates):
        row.numel.fill_(update.numel())
        u = in_memory_order(update)
        if "u_squares" in needed:
            row.u_squares.add_(_squares(u))
        if "p_squares" not in needed and "products" not in needed:
            continue
        for begin in range(0, u.numel(), PIECE_NUMEL):
            piece = slice(begin, begin + PIECE_NUMEL)
            p = _main(work, piece).to(u.dtype)
            row.p_squares.add_(_squares(p))
            if "products" in needed:
                row.products.add_(_product(p, u[piece]))
    return found


def columns(sums: Tensor) -> Sums:
    """The columns of `sums` (n, NUM_SUMS)."""
    return Sums(*sums.unbind(1))


def _main(work: Work, piece: slice) -> Tensor:
    """Elements of the main in its order of memory, joined from its remainder if need be."""
    anchor = work.main if work.main is not None else work.out
    assert anchor is not None
    p = flat(anchor, anchor, "main")[piece]
    return p if work.remainder is None else remainder.join(p, flat(work.remainder, anchor, "remainder")[piece])


def _squares(x: Tensor) -> Tensor:
    """|x|^2 of (n,), 0-d float64."""
    rows = x.numel() // ROW * ROW
    norms: Tensor = torch.linalg.vector_norm(x[:rows].view(-1, ROW), dim=1)
    rest: Tensor = torch.linalg.vector_norm(x[rows:])
    return norms.double().square().sum() + rest.double().square()


def _product(a: Tensor, b: Tensor) -> Tensor:
    """<a, b> of (n,), 0-d float64."""
    rows = a.numel() // ROW * ROW
    whole = (a[:rows].view(-1, ROW) * b[:rows].view(-1, ROW)).sum(-1).double().sum()
    return whole + (a[rows:] * b[rows:]).sum().double()
