"""The elementwise parts of Muon's step, before and after the orthogonalisation of whole matrices."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from opt_kernels.choice import NamedChoice
from opt_kernels.codecs import StateCodec
from opt_kernels.matrices.newton_schulz import EPS
from opt_kernels.works import Hyper, Task, Work

__all__ = ["MOMENTUM", "Adapt", "Decay", "Factors", "Inputs", "MuonStep", "Transform"]


MOMENTUM = "momentum_buffer"


class Decay(NamedChoice):
    """How the weight decay wd enters a step."""

    DECOUPLED = "decoupled"  # p <- p - lr wd p
    INDEPENDENT = "independent"  # p <- p - wd p: the learning rate and its schedule do not matter
    L2 = "l2"  # g <- g + wd p


class Inputs(NamedTuple):
    """The format in which a transformation prefers the matrices of a work."""

    dtype: torch.dtype
    normalised: bool  # each matrix, or each of its split parts, is divided by its Frobenius norm
    all_reduce: Callable[[Tensor], Tensor] | None = None  # sums squares over the ranks that hold the other parts
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


def decay_rate(decay: Decay, hyper: Hyper) -> float | Tensor:
    """The factor of wd p in the update of the weights. Not used with L2."""
    return hyper.lr if decay is Decay.DECOUPLED else 1.0


def decay_of(main: Tensor, weight_decay: float | Tensor) -> Tensor:
    """`weight_decay * main`, a new tensor. Without decay it is zero even for an infinite weight."""
    if isinstance(weight_decay, Tensor):
        return torch.where(weight_decay == 0, 0.0, weight_decay * main)
    return weight_decay * main if weight_decay else torch.zeros_like(main)
