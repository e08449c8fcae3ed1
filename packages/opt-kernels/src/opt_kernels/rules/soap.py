"""SOAP: Adam in the slowly changing eigenbasis of Shampoo's preconditioner."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from opt_kernels.matrices.access import PartStates
from opt_kernels.rules.eigenbases import (
    LEFT,
    RIGHT,
    EigenbasisRule,
    Order,
    into_basis,
    out_of_basis,
    reordered,
)
from opt_kernels.rules.whole_matrices import WholeMatrices
from opt_kernels.works import Hyper, Skip, Task

__all__ = ["Order", "SOAPRule"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SOAPRule(EigenbasisRule):
    """SOAP (Vyas et al., arXiv 2409.11321); by default KL-SOAP, with KL-Shampoo's factors (Lin et al., 2509.03378).

    Of `Hyper`: lr, weight_decay, step t, betas, eps. For a gradient G (m, n) of each matrix:

        update    exp_avg, exp_avg_sq <- Adam's, of Q_Lᵀ G Q_R;  U = Adam's update of them
                  p <- p - lr wd p - lr Q_L U Q_Rᵀ
        factors   L and R <- G's, plain or KL: see `opt_kernels.rules.eigenbases.EigenbasisRule`
        bases     every `precondition_frequency` steps: Q_L, λ_L and Q_R, λ_R become the eigenvectors and values of L
                  and R, found by eigh at the first step, then by `power_iterations` of Q <- orthonormalise(L Q);
                  exp_avg is turned into the new bases

    With order "paper" these run from top to bottom. The first step only computes the bases: p and the moments do not
    change, and Adam counts t - 1 steps. Bases are sorted before they are rotated, and exp_avg_sq is reordered with
    them.

    With order "megatron", that of Megatron-Core (Emerging-Optimizers), factors and bases are updated before p, and p
    changes from the first step on; Adam counts t steps. Bases are sorted after they are rotated, and exp_avg_sq is not
    reordered. Eigenvalues begin at 0 and are clamped to eps where they divide. Weights follow recorded runs of
    Megatron-Core; where a matrix is more than twice as tall as wide, or reverse, the first bases include a null space
    chosen by rounding errors, and runs agree as far as these errors do.

    A gradient is diagonal, except for rounding errors, in bases computed from the gradient itself. In the first steps
    of order "megatron" Adam divides these rounding errors by second moments near zero, so with a small eps they become
    updates as large as lr, and thousands of times as large with gradients of rank 1. This is why "paper" is the
    default.

    Gradients of 1e-12 to 1e12 are followed: bases do not depend on their scale, except for that of eps and, for KL,
    of the first eigenvalues. MatrixError is raised before anything of a matrix is written if a factor overflows or a
    gradient is not finite: from about 1e18 on, for KL with eps 1e-8 from about 1e14 on.

    With `max_precond_dim`, a longer side has no factor and no basis, as in the authors' code: an output layer of
    128,000 rows would need 2 x 64 GB. With `one_sided` only the shorter side has them, as in the paper's variant.

    If `MatrixSpec.split_rows` splits rows into separate matrices (heads, or q, k and v), each part has its own factors
    and bases, and all of the above applies to each part as if it were a parameter. Heads are batched. Megatron-Core
    does not split fused rows.

    The host reads the step and the skip flag, so this rule cannot be captured in a CUDA graph.
    Raises ValueError for options out of range; `update_` raises MatrixError for parts of a matrix.
    """

    use_kl_shampoo: bool = True
    precondition_frequency: int = 1
    order: Order = Order.PAPER

    def __post_init__(self) -> None:
        EigenbasisRule.__post_init__(self)
        if self.precondition_frequency < 1:
            raise ValueError(f"precondition_frequency is {self.precondition_frequency}, but must be at least 1")

    name = "soap"
    moments = ("exp_avg", "exp_avg_sq")  # Adam's, in the bases

    @property
    def keeps_null_spaces(self) -> bool:
        return self.order is Order.PAPER

    corrects_bias = True

    def direct_(self, states: PartStates, grads: Tensor, hyper: Hyper) -> Tensor:
        """Q_L U Q_Rᵀ; zeros in a first step that only computes the bases."""
        step = int(hyper.step)
        factors = self.factors(states, grads, hyper)  # raises before any write
        if self.order is Order.MEGATRON:
            self._precondition_(states, factors, step)
            return self._update_(states, grads, hyper, count=step)
        updates = self._update_(states, grads, hyper, count=step - 1) if step > 1 else torch.zeros_like(grads)
        self._precondition_(states, factors, step)
        return updates

    def _update_(self, states: PartStates, grads: Tensor, hyper: Hyper, *, count: int) -> Tensor:
        sides = self.sides(grads.shape)
        update = _adam_(states, into_basis(states, grads, sides), hyper, count=count)
        return out_of_basis(states, update, sides)

    def _precondition_(self, states: PartStates, factors: Mapping[str, Tensor], step: int) -> None:
        """Store the factors and, every `precondition_frequency` steps, update the bases and the moments in them."""
        for side, factor in factors.items():
            states.store_(side, factor)
        if (step - 1) % self.precondition_frequency == 0:
            turned = self.turn_(states, factors, first=step == 1)
            exp_avg = states.load("exp_avg")
            for side in (LEFT, RIGHT):
                exp_avg = turned[side].rotation @ exp_avg if side in turned else exp_avg
                exp_avg = exp_avg.mT  # the right side is the left one of the transpose
            states.store_("exp_avg", exp_avg)
            if self.order is Order.PAPER:
                states.store_("exp_avg_sq", reordered(states.load("exp_avg_sq"), turned))

    def apply_(self, task: Task, update: Tensor, skip: Skip) -> None:
        """p <- p - lr wd p - lr update, except in a first step that only computes the bases."""
        if self.order is not Order.PAPER or int(task.hyper.step) > 1:
            WholeMatrices.apply_(self, task, update, skip)


def _adam_(states: PartStates, grads: Tensor, hyper: Hyper, *, count: int) -> Tensor:
    """Adam's update number `count` for gradients in the bases; updates the moments."""
    beta1, beta2 = map(float, hyper.betas)
    exp_avg = states.load("exp_avg").lerp_(grads, 1.0 - beta1)
    exp_avg_sq = states.load("exp_avg_sq").mul_(beta2).addcmul_(grads, grads, value=1.0 - beta2)
    states.store_("exp_avg", exp_avg)
    states.store_("exp_avg_sq", exp_avg_sq)
    root = exp_avg_sq.div_(1.0 - beta2**count).sqrt_().add_(hyper.eps)
    return exp_avg.div_(1.0 - beta1**count).div_(root)
