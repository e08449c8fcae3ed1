"""Factors of the update p <- keep p - rate u, from sums over a parameter and the numbers of its group."""

from typing import NamedTuple

import torch
from torch import Tensor

from opt_kernels.hooks.sums import columns
from opt_kernels.hooks.values import (
    CautiousUpdate,
    ClipUpdateRms,
    CoupledDecay,
    Hook,
    Hooks,
    Hyperball,
    LrDecoupledDecay,
    RelativeUpdate,
)
from opt_kernels.works import Hyper


class Moves(NamedTuple):
    """Factors of works that share one row of the hyper-parameter table, (n,) float64 each."""

    keep: Tensor
    rate: Tensor


def moves_of(hooks: Hooks, sums: Tensor, hyper: Hyper, *, couples: bool) -> Moves:
    """The factors of works with these sums (n, NUM_SUMS) over whole parameters, without synchronizing the host.

    With `couples`, the decay of the rule was already added to the gradient.
    """
    ball = next((hook for hook in hooks if isinstance(hook, Hyperball)), None)
    if ball is not None:
        return _on_the_ball(ball, sums, hyper)
    factors = torch.ones_like(sums[:, 0])
    for hook in sorted(hooks, key=lambda hook: not isinstance(hook, CautiousUpdate)):
        factors = factors * _factors(hook, sums, factors)
    rate = hyper.lr * factors
    return Moves(1 - share_that_decays(hooks, hyper, couples=couples) * torch.ones_like(rate), rate)


def share_that_decays(hooks: Hooks, hyper: Hyper, *, couples: bool) -> float | Tensor:
    """d in p <- p - d p, for elements that are not masked."""
    decay = next((hook for hook in hooks if hook.decays), None)
    if isinstance(decay, CoupledDecay) or (decay is None and couples):
        return 0.0
    if isinstance(decay, LrDecoupledDecay):
        return hyper.lr / decay.max_lr * hyper.weight_decay
    return hyper.lr * hyper.weight_decay


def _factors(hook: Hook, sums: Tensor, before: Tensor) -> Tensor:
    """The factors of `hook`, (n,), for updates that were already multiplied by `before`."""
    numel, kept, u_squares, p_squares, _ = columns(sums)
    u_norm = before * u_squares.sqrt()
    match hook:
        case CautiousUpdate():
            return numel / (kept + 1)
        case ClipUpdateRms(threshold=threshold):
            return 1 / (u_norm / numel.clamp_min(1).sqrt() / threshold).clamp_min(1)
        case RelativeUpdate():
            p_norm = p_squares.sqrt()
            return torch.where((u_norm == 0) | (p_norm == 0), 1.0, p_norm / u_norm)
    return torch.ones_like(before)


LEAST_NORM = 1e-8  # of rows


def raise_rows_(update: Tensor, main: Tensor, ratio: float | Tensor) -> None:
    """Scale up the rows of `update` (rows, ...) whose norm is below `ratio` times that of the row of `main`."""
    if update.dim() > 1 and update.numel():
        dims = tuple(range(1, update.dim()))
        of_update, of_main = (
            torch.linalg.vector_norm(x, dim=dims, keepdim=True).double().clamp_min_(LEAST_NORM) for x in (update, main)
        )
        update.mul_((ratio * of_main / of_update).clamp_min_(1.0))


def _on_the_ball(ball: Hyperball, sums: Tensor, hyper: Hyper) -> Moves:
    """R N(p - lr R N(u)); the norm of the inner vector follows from the sums, so one reduction suffices."""
    _, _, u_squares, p_squares, products = columns(sums)
    radius = p_squares.sqrt() if ball.radius is None else torch.full_like(p_squares, ball.radius)
    step = torch.where(u_squares == 0, 0.0, hyper.lr * radius / u_squares.sqrt())
    norm = (p_squares - 2 * step * products + step * step * u_squares).sqrt()
    keep = torch.where(norm == 0, 1.0, radius / norm)  # zeros have no direction and stay zero
    return Moves(keep, keep * step)
