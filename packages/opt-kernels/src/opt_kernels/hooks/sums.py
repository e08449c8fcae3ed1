"""Sums over the elements of a work, the factors that follow from them, and row means whose rows span ranks.

The sums of all parts of a parameter are added. Row sums are float64. The mean of a row is rounded once, to the
gradient's dtype: it differs from that of one process by the rounding of a float32 mean.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from opt_kernels.backends.elements import anchor_of, flat, in_memory_order
from opt_kernels.codecs import narrow
from opt_kernels.hooks import values
from opt_kernels.works import Hyper, Scalar, Work

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
        if "p_squares" not in needed:  # hooks that read products read these, too
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
    anchor = anchor_of(work)
    p = flat(anchor, anchor, "main")[piece]
    return p if work.remainder is None else narrow.join(p, flat(work.remainder, anchor, "remainder")[piece])


def _squares(x: Tensor) -> Tensor:
    """|x|^2 of (n,), 0-d float64."""
    rows = x.numel() // ROW * ROW
    norms: Tensor = torch.linalg.vector_norm(x[:rows].view(-1, ROW), dim=1)
    rest: Tensor = torch.linalg.vector_norm(x[rows:])
    return norms.double().square().sum() + rest.double().square()


def _product(a: Tensor, b: Tensor) -> Tensor:
    """<a, b> of (n,), 0-d float64."""
    rows = a.numel() // ROW * ROW
    products = a * b
    return products[:rows].view(-1, ROW).sum(-1).double().sum() + products[rows:].sum().double()


def moves_of(hooks: values.Hooks, sums: Tensor, hyper: Hyper, *, couples: bool) -> tuple[Tensor, Tensor]:
    """The factors keep and rate, (n,) float64 each, of works with these sums (n, NUM_SUMS) over whole parameters.

    The works share one row of the hyper-parameter table. Does not synchronize the host. With `couples`, the decay of
    the rule was already added to the gradient.
    """
    found = columns(sums)
    for hook in hooks:
        if isinstance(hook, values.Hyperball):
            return _on_the_ball(hook, found, hyper)
    factors = torch.ones_like(found.numel)
    for hook in sorted(hooks, key=lambda hook: not isinstance(hook, values.CautiousUpdate)):
        factors = factors * _factors(hook, found, factors)
    rate = hyper.lr * factors
    keep = torch.ones_like(rate)
    p_squares = found.p_squares
    products = found.products
    for hook in hooks:
        if isinstance(hook, values.RadialBrake):
            outward = torch.where(p_squares == 0, 0.0, products.clamp_max(0.0) / p_squares)  # c, or 0 for c > 0
            keep = keep + (1 - hook.outward) * rate * outward
    if any(isinstance(hook, values.RadiusPin) for hook in hooks):
        # w = keep p - rate u gets the length of its part along p: it is scaled by <w, p> / (|w| |p|).
        lengths = (_squares_of_moved(found, keep, rate) * p_squares).sqrt()
        scale = torch.where(lengths == 0, 1.0, (keep * p_squares - rate * products) / lengths)
        keep = scale * keep
        rate = scale * rate
    return keep - share_that_decays(hooks, hyper, couples=couples), rate


def _squares_of_moved(sums: Sums, keep: float | Tensor, rate: Tensor) -> Tensor:
    """|keep p - rate u|², (n,): it follows from the sums, so one reduction suffices."""
    _, _, u_squares, p_squares, products = sums
    squares = keep * keep * p_squares - 2 * keep * rate * products + rate * rate * u_squares
    return squares.clamp_min(0.0)


def share_that_decays(hooks: values.Hooks, hyper: Hyper, *, couples: bool) -> Scalar:
    """d in p <- p - d p, for elements that are not masked."""
    decay = next((hook for hook in hooks if hook.decays), None)
    if isinstance(decay, values.CoupledDecay) or (decay is None and couples):
        return 0.0
    if isinstance(decay, values.LrDecoupledDecay):
        return hyper.lr / decay.max_lr * hyper.weight_decay
    return hyper.lr * hyper.weight_decay


def _factors(hook: values.Hook, sums: Sums, before: Tensor) -> Tensor:
    """The factors of `hook`, (n,), for updates that were already multiplied by `before`."""
    numel, kept, u_squares, p_squares, _ = sums
    u_norm = before * u_squares.sqrt()
    match hook:
        case values.CautiousUpdate():
            return numel / (kept + 1)
        case values.ClipUpdateRms(threshold=threshold):
            return 1 / (u_norm / numel.clamp_min(1).sqrt() / threshold).clamp_min(1)
        case values.RelativeUpdate():
            p_norm = p_squares.sqrt()
            return torch.where((u_norm == 0) | (p_norm == 0), 1.0, p_norm / u_norm)
    return torch.ones_like(before)


LEAST_NORM = 1e-8  # of rows


def raise_rows_(update: Tensor, main: Tensor, ratio: Scalar) -> None:
    """Scale up the rows of `update` (rows, ...) whose norm is below `ratio` times that of the row of `main`."""
    if update.dim() > 1 and update.numel():
        dims = tuple(range(1, update.dim()))
        of_update, of_main = (
            torch.linalg.vector_norm(x, dim=dims, keepdim=True).double().clamp_min_(LEAST_NORM) for x in (update, main)
        )
        update.mul_((ratio * of_main / of_update).clamp_min_(1.0))


def _on_the_ball(ball: values.Hyperball, sums: Sums, hyper: Hyper) -> tuple[Tensor, Tensor]:
    """R N(p - lr R N(u))."""
    _, _, u_squares, p_squares, _ = sums
    radius = p_squares.sqrt() if ball.radius is None else torch.full_like(p_squares, ball.radius)
    step = torch.where(u_squares == 0, 0.0, hyper.lr * radius / u_squares.sqrt())
    norm = _squares_of_moved(sums, 1.0, step).sqrt()
    keep = torch.where(norm == 0, 1.0, radius / norm)  # zeros have no direction and stay zero
    return keep, keep * step


class SpannedRows(NamedTuple):
    """The rows of one parameter, of which this rank stores parts."""

    num: int  # of the local parameter
    dims: int  # number of leading dims that index rows
    local_numel: int  # elements of one row on this rank
    whole_numel: int  # elements of one row on all ranks


class RowMeans(NamedTuple):
    """The means of the rows of which one work has elements."""

    means: Tensor  # (rows.num,) float64, of gradients before they are scaled
    rows: SpannedRows
    first: int  # index of the work's first element in the flattened local parameter


def add_row_sums_(sums: Tensor, grad: Tensor, rows: SpannedRows, *, first: int) -> None:
    """Add the row sums of `grad` to `sums` (rows.num,) float64.

    `grad` has the shape of the local parameter, or is a flat run of it that starts at element `first`.
    """
    for at, part, dims in _parts(grad, rows, first):
        sums[at] += part.sum(tuple(range(dims, part.dim())), dtype=torch.float64).view(-1)


def subtract_row_means_(grad: Tensor, of: RowMeans, *, scale: Scalar) -> None:
    """Subtract `scale` times the row mean from each element of `grad`, which was scaled already."""
    means = (of.means * scale).to(grad.dtype)
    for at, part, dims in _parts(grad, of.rows, of.first):
        part -= means[at].view(*part.shape[:dims], *[1] * (part.dim() - dims))


def _parts(x: Tensor, rows: SpannedRows, first: int) -> Iterator[tuple[slice, Tensor, int]]:
    """Views of `x`, the rows of which each has elements, and the number of its leading dims that index rows."""
    if x.dim() > 1:
        yield slice(0, rows.num), x, rows.dims
        return
    begin = 0
    width = rows.local_numel
    while begin < x.numel():
        row, column = divmod(first + begin, width)
        num = 1 if column else max(1, (x.numel() - begin) // width)  # one partial row, or all whole rows
        end = min(begin + num * width - column, x.numel())
        yield slice(row, row + num), x[begin:end].view(num, -1), 1
        begin = end
