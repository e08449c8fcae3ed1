"""The elementwise parts of Muon's step, before and after the orthogonalisation of whole matrices, and its scales.

Here as torch operations, one matrix at a time so that it stays in the cache; `triton` has the version for GPUs.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from opt_kernels.backends.elements import read_main
from opt_kernels.codecs import StateCodec
from opt_kernels.matrices import access
from opt_kernels.works import AllReduce, Batch, NamedChoice, Task, Work

MOMENTUM = "momentum_buffer"
EPS = 1e-15  # as in Megatron-Core; far below any gradient, so that clipping cannot push a momentum under it


class Decay(NamedChoice):
    """How the weight decay wd enters a step."""

    DECOUPLED = "decoupled"  # p <- p - lr wd p
    INDEPENDENT = "independent"  # p <- p - wd p: the learning rate and its schedule do not matter
    L2 = "l2"  # g <- g + wd p


class ScaleMode(NamedChoice):
    """Factor of the orthogonal matrix (rows, cols), so that one learning rate suits every shape."""

    SPECTRAL = "spectral"  # sqrt(max(rows, cols)): elements have a root mean square of 1
    UNIT_RMS_NORM = "unit_rms_norm"  # sqrt(rows / cols): the change of an output per change of an input is 1
    SHAPE_SCALING = "shape_scaling"  # sqrt(max(1, rows / cols)): as by Keller Jordan
    MATCH_RMS_ADAMW = "match_rms_adamw"  # 0.2 sqrt(max(rows, cols)): AdamW's root mean square (Moonlight, 2502.16982)
    MUP = "mup"  # sqrt(rows / cols), by muP's spectral condition (Yang et al., arXiv 2310.17813): as UNIT_RMS_NORM


class PreNorm(NamedChoice):
    """What the input u of Newton-Schulz is divided by."""

    NONE = "none"
    ROWS = "rows"  # each row by its norm (MuonEq, arXiv 2603.28254)


class PostNorm(NamedChoice):
    """How the output O (m, n) of Newton-Schulz is normalised (Muon+, arXiv 2602.21545)."""

    NONE = "none"
    FROBENIUS = "frobenius"  # O sqrt(min(m, n)) / |O|: the norm of an orthogonal matrix (nanochat)
    ROWS = "rows"  # each row divided by its norm
    COLS = "cols"  # each column divided by its norm
    ROWS_COLS = "rows_cols"  # rows, then columns
    COLS_ROWS = "cols_rows"  # columns, then rows

    @property
    def dims(self) -> tuple[tuple[int, ...], ...]:
        """The dims over which norms are taken, one after the other."""
        if self is PostNorm.FROBENIUS:
            return ((-2, -1),)
        dim_of = {"rows": -1, "cols": -2}
        return tuple((dim_of[line],) for line in self.value.split("_") if line in dim_of)


def scale_factor(mode: ScaleMode, *, rows: int, cols: int) -> float:
    """The factor of `mode` for a matrix of this size; under tensor parallelism, the size of the whole matrix."""
    match mode:
        case ScaleMode.SPECTRAL:
            return float(max(rows, cols) ** 0.5)
        case ScaleMode.MATCH_RMS_ADAMW:
            return float(0.2 * max(rows, cols) ** 0.5)
        case ScaleMode.UNIT_RMS_NORM | ScaleMode.MUP:
            return float((rows / cols) ** 0.5)
        case ScaleMode.SHAPE_SCALING:
            return float(max(1.0, rows / cols) ** 0.5)


class Inputs(NamedTuple):
    """The format in which a transformation prefers the matrices of a work."""

    dtype: torch.dtype
    normalised: bool  # each matrix, or each of its split parts, is divided by its Frobenius norm
    all_reduce: AllReduce | None = None  # sums squares over the ranks that hold the other parts
    eps: float = EPS  # smallest norm that a matrix is divided by


# Returns directions from works of one layout, their matrices (len(tasks), *shape), and whether these are normalised.
Transform = Callable[[Sequence[Task], Tensor, bool], Tensor]
# Changes one direction (*shape) before it is scaled.
Adapt = Callable[[Task, Tensor], None]
# Returns s e of each split part of a work, or of the whole matrix.
Factors = Callable[[Work], tuple[float, ...]]


class MuonStep(NamedTuple):
    """What a step of Muon consists of. `muon_` of each backend performs it."""

    transform: Transform
    inputs: Callable[[Work], Inputs]  # of `transform`; a backend may pass matrices that are not normalised instead
    factors: Factors
    nesterov: bool
    decay: Decay
    codec: StateCodec  # of the momentum
    adapt_: Adapt | None = None


def decay_of(main: Tensor, weight_decay: float | Tensor) -> Tensor:
    """`weight_decay * main`, a new tensor. Without decay it is zero even for an infinite weight."""
    if isinstance(weight_decay, Tensor):
        return torch.where(weight_decay == 0, 0.0, weight_decay * main)
    return weight_decay * main if weight_decay else torch.zeros_like(main)


def muon_(
    batches: Sequence[Batch], step: MuonStep, *, grad_scale: float | Tensor = 1.0, skip: Tensor | None = None
) -> None:
    """Write `main`, `out`, `remainder` and the state `momentum_buffer` of every work; nothing if `skip` is set.

        g <- grad_scale g          (g <- g + wd p with L2)
        m <- m + (1 - mu)(g - m)
        u <- g + mu (m - g)        with nesterov, else m
        O <- adapt(transform(u))
        p <- p - lr wd p - lr s e O    (p <- p - wd p - lr s e O with independent decay)

    `transform` receives stacks of works of one layout, in the compute dtype and not normalised; `step.inputs` is
    ignored.
    """
    for tasks in access.stacks(batches):
        matrices = access.scaled_grads(tasks, grad_scale)
        for grad, task in zip(matrices, tasks):
            accumulate_(task, grad, step, skip)
        for update, task in zip(step.transform(tasks, matrices, False), tasks):
            if step.adapt_ is not None:
                step.adapt_(task, update)
            descend_(task, update, step, skip)


def accumulate_(task: Task, grad: Tensor, step: MuonStep, skip: Tensor | None) -> None:
    """Update the momentum, and turn `grad` (*shape), scaled and in the compute dtype, into u in place."""
    hyper, work = task
    if step.decay is Decay.L2:
        grad.add_(decay_of(read_main(work), hyper.weight_decay))
    stored = work.state[MOMENTUM]
    in_place = skip is None and stored.dtype is grad.dtype
    momentum = stored if in_place else access.read_state(work, MOMENTUM, step.codec)
    momentum.lerp_(grad, access.weight_for(momentum, 1.0 - hyper.momentum))
    if not in_place:
        access.write_state_(work, MOMENTUM, step.codec, momentum, skip)
    if step.nesterov:
        grad.lerp_(momentum, access.weight_for(grad, hyper.momentum))
    else:
        grad.copy_(momentum)


def descend_(task: Task, update: Tensor, step: MuonStep, skip: Tensor | None) -> None:
    """p <- p - (decay) - lr s e `update` (*shape), unless the step is skipped. Overwrites `update`."""
    hyper, work = task
    scale_parts_(work, update, step.factors(work))
    main = read_main(work, copy=skip is not None)
    if step.decay is not Decay.L2:
        main.mul_(1.0 - (hyper.lr if step.decay is Decay.DECOUPLED else 1.0) * hyper.weight_decay)
    access.write_main_(work, main.sub_(update.mul_(hyper.lr)), skip)


def scale_parts_(work: Work, update: Tensor, factors: tuple[float, ...]) -> None:
    """Multiply the rows of each split part of `update` (*shape) by the factor of the part."""
    if len(factors) == 1:
        update.mul_(factors[0])
        return
    sizes = work.matrix.split_rows
    first = 0 if work.matrix.part is None else work.matrix.part.first_row
    rows = torch.arange(first, first + update.shape[-2], dtype=torch.int64, device=update.device)
    of_group = rows.remainder_(sum(sizes))
    scales = torch.full_like(of_group, factors[-1], dtype=update.dtype)
    for factor, end in reversed(list(zip(factors[:-1], accumulate(sizes)))):
        scales.masked_fill_(of_group < end, factor)
    update.mul_(scales.unsqueeze(-1))
