"""The options and scales of Muon; `triton` performs its steps on GPUs."""

from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from opt_kernels.works import AllReduce, NamedChoice, Scalar, Work

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
        dims_of = {"frobenius": (-2, -1), "rows": (-1,), "cols": (-2,)}
        return tuple(dims_of[norm] for norm in self.value.split("_") if norm in dims_of)


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


# Returns s e of each split part of a work, or of the whole matrix.
Factors = Callable[[Work], tuple[float, ...]]


def decay_of(main: Tensor, weight_decay: Scalar) -> Tensor:
    """`weight_decay * main`, a new tensor. Without decay it is zero even for an infinite weight."""
    if isinstance(weight_decay, Tensor):
        return torch.where(weight_decay == 0, 0.0, weight_decay * main)
    return weight_decay * main if weight_decay else torch.zeros_like(main)


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
