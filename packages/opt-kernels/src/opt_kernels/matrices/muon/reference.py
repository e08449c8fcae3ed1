"""Muon's elementwise steps before and after the orthogonalisation, by their formulas, work by work."""

from collections.abc import Sequence

import torch
from torch import Tensor

from opt_kernels.backends.elements import skipped
from opt_kernels.matrices.muon import Decay, MuonStep
from opt_kernels.matrices.stacks import check, compute_dtype, read_main, read_state, write_main_, write_state_
from opt_kernels.works import Batch, Hyper, Task, Work

MOMENTUM = "momentum_buffer"


def muon_(
    batches: Sequence[Batch], step: MuonStep, *, grad_scale: float | Tensor = 1.0, skip: Tensor | None = None
) -> None:
    """Write `main`, `out`, `remainder` and the state `momentum_buffer` of every work; nothing if `skip` is set.

        g <- grad_scale g          (g <- g + wd p with L2)
        m <- m + (1 - mu)(g - m)
        u <- g + mu (m - g)        with nesterov, else m
        O <- adapt(transform(u))
        p <- p - lr wd p - lr s e O    (p <- p - wd p - lr s e O with independent decay)

    `transform` receives matrices in the compute dtype, not normalised; `step.inputs` is ignored.
    """
    if skipped(skip):
        return
    for hyper, works in batches:
        for work in works:
            check(work)
            if not work.grad.numel():
                continue
            task, main = Task(hyper, work), read_main(work)
            g = work.grad.to(compute_dtype(work)) * grad_scale
            if step.decay is Decay.L2:
                g = g + decay_of(main, hyper.weight_decay)
            m = read_state(work, MOMENTUM, step.codec)
            m = m + (1.0 - hyper.momentum) * (g - m)
            write_state_(work, MOMENTUM, step.codec, m, None)
            u = g + hyper.momentum * (m - g) if step.nesterov else m
            direction = step.transform([task], u.unsqueeze(0), False)[0]
            if step.adapt_ is not None:
                step.adapt_(task, direction)
            # A product, as in torch.optim.Muon: an infinite weight stays infinite.
            decay = 1.0 - decay_rate(step.decay, hyper) * hyper.weight_decay
            decayed = main if step.decay is Decay.L2 else main * decay
            write_main_(work, decayed - hyper.lr * _of_rows(work, step.factors(work), direction) * direction, None)


def decay_rate(decay: Decay, hyper: Hyper) -> float | Tensor:
    """The factor of wd p in the update of the weights. Not used with L2."""
    return hyper.lr if decay is Decay.DECOUPLED else 1.0


def decay_of(main: Tensor, weight_decay: float | Tensor) -> Tensor:
    """`weight_decay * main`, a new tensor. Without decay it is zero even for an infinite weight."""
    if isinstance(weight_decay, Tensor):
        return torch.where(weight_decay == 0, 0.0, weight_decay * main)
    return weight_decay * main if weight_decay else torch.zeros_like(main)


def _of_rows(work: Work, factors: tuple[float, ...], direction: Tensor) -> Tensor:
    """The factor of each row, (rows, 1)."""
    sizes = work.matrix.split_rows or (direction.shape[-2],)
    first = 0 if work.matrix.part is None else work.matrix.part.first_row
    of_group = [factor for factor, size in zip(factors, sizes) for _ in range(size)]
    rows = [of_group[(first + row) % len(of_group)] for row in range(direction.shape[-2])]
    return torch.tensor(rows, dtype=direction.dtype, device=direction.device).unsqueeze(-1)
