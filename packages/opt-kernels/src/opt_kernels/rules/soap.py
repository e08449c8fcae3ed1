"""SOAP: Adam in the slowly changing eigenbasis of Shampoo's preconditioner."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from opt_kernels.backends.dispatch import check_backend
from opt_kernels.backends.elements import skipped
from opt_kernels.matrices.muon.reference import decay_of
from opt_kernels.matrices.parts import PartStates, parts_of, states_by_part
from opt_kernels.matrices.shampoo import (
    LEFT,
    RIGHT,
    Order,
    Orthonormalization,
    Shampoo,
    Turned,
    into_basis,
    out_of_basis,
)
from opt_kernels.matrices.stacks import MatrixError, check_shape, join, matrix_dim, read_main, split, write_main_
from opt_kernels.precision import MatmulPrecision, fp32_products
from opt_kernels.rules.whole_matrices import WholeMatrices
from opt_kernels.works import NOT_SPLIT, Hyper, MatrixSpec, StateSpec, Task, Work

__all__ = ["Order", "Orthonormalization", "SOAPRule"]

_MOMENTS = ("exp_avg", "exp_avg_sq")  # in the bases


@dataclass(frozen=True, slots=True, kw_only=True)
class SOAPRule(WholeMatrices):
    """SOAP (Vyas et al., arXiv 2409.11321); by default KL-SOAP, with KL-Shampoo's factors (Lin et al., 2509.03378).

    Of `Hyper`: lr, weight_decay, step t, betas, eps. For a gradient G (m, n) of each matrix:

        update    exp_avg, exp_avg_sq <- Adam's, of Q_Lᵀ G Q_R;  U = Adam's update of them
                  p <- p - lr wd p - lr Q_L U Q_Rᵀ
        factors   L and R <- G's, plain or KL: see `opt_kernels.matrices.shampoo.Shampoo`
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
    updates as large as lr. This is why "paper" is the default.

    Gradients of 1e-12 to 1e12 are followed: bases do not depend on their scale, except for that of eps and, for KL,
    of the first eigenvalues. MatrixError is raised before anything is written if a factor overflows or a gradient is
    not finite: from about 1e18 on, for KL with eps 1e-8 from about 1e14 on.

    With `max_precond_dim`, a longer side has no factor and no basis, as in the authors' code: an output layer of
    128,000 rows would need 2 x 64 GB. With `one_sided` only the shorter side has them, as in the paper's variant.

    If `MatrixSpec.split_rows` splits rows into separate matrices (heads, or q, k and v), each part has its own factors
    and bases, and all of the above applies to each part as if it were a parameter. Heads are batched. Megatron-Core
    does not split fused rows.

    The host reads the step and the skip flag, so this rule cannot be captured in a CUDA graph.
    Raises ValueError for options out of range; `update_` raises MatrixError for parts of a matrix.
    """

    use_kl_shampoo: bool = True
    shampoo_beta: float = 0.95
    precondition_frequency: int = 1
    power_iterations: int = 1
    orthonormalization: Orthonormalization = Orthonormalization.BY_ORDER
    order: Order = Order.PAPER
    max_precond_dim: int | None = 10_000  # None: every side has a factor
    one_sided: bool = False
    backend: str | None = None  # "reference", "torch"; None: by device

    def __post_init__(self) -> None:
        check_backend(self.backend, "orthogonal_basis")
        if not 0.0 <= self.shampoo_beta < 1.0:
            raise ValueError(f"shampoo_beta is {self.shampoo_beta}, but must be in [0, 1); 0.95 is usual")
        for name, value in (
            ("precondition_frequency", self.precondition_frequency),
            ("power_iterations", self.power_iterations),
            ("max_precond_dim", 1 if self.max_precond_dim is None else self.max_precond_dim),
        ):
            if value < 1:
                raise ValueError(f"{name} is {value}, but must be at least 1")

    @property
    def name(self) -> str:
        return "soap"

    @property
    def shampoo(self) -> Shampoo:
        """The preconditioner of the rule."""
        return Shampoo(
            beta=self.shampoo_beta,
            use_kl=self.use_kl_shampoo,
            power_iterations=self.power_iterations,
            orthonormalization=self.orthonormalization,
            order=self.order,
            max_dim=self.max_precond_dim,
            one_sided=self.one_sided,
            backend=self.backend,
        )

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        return tuple(StateSpec(name=name, whole=True) for name in _MOMENTS) + self.shampoo.state_specs

    def init_state(self, main: Tensor, matrix: MatrixSpec = NOT_SPLIT) -> dict[str, Tensor]:
        """Zero moments and factors; the bases and eigenvalues of the identity, for each part of a split parameter.

        Raises MatrixError for a parameter that is not a matrix.
        """
        check_shape(main.shape)
        moments = {name: torch.zeros_like(main, dtype=torch.float32) for name in _MOMENTS}
        return moments | self.shampoo.init_state(main, matrix)

    def transform_(self, tasks: Sequence[Task], inputs: Tensor, skip: Tensor | None) -> Tensor:
        """Q_L U Q_Rᵀ of gradients; zeros in a first step that only computes the bases. Updates moments and bases."""
        return self.transform_parts_(tasks, inputs, skip, lambda updates: updates)

    def transform_parts_(
        self, tasks: Sequence[Task], inputs: Tensor, skip: Tensor | None, then: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """`transform_`, with `then` applied to the updates (matrices, rows, cols) of each part, except the zeros of a
        first step."""
        hyper, work = tasks[0]
        _check_whole(work)
        if skipped(skip):
            return torch.zeros_like(inputs)
        shapes = [self.shampoo.shapes(part.shape) for part in parts_of(work.matrix, inputs.shape)]
        states = states_by_part(tasks, elements=_MOMENTS, shapes=shapes, dtype=inputs.dtype)
        # In TF32 the bases would lose four digits of orthogonality, and every later step uses them.
        with fp32_products(MatmulPrecision.HIGHEST):
            grads = split(inputs, work.matrix)
            updates = [self._step_(of_part, grad, hyper) for of_part, grad in zip(states, grads, strict=True)]
        if not self.only_finds_bases(hyper):
            updates = list(map(then, updates))
        return join(updates, work.matrix, inputs.shape)

    def _step_(self, states: PartStates, grads: Tensor, hyper: Hyper) -> Tensor:
        """The updates of matrices (batch, m, n)."""
        step = int(hyper.step)
        factors = self.shampoo.factors(states, grads, step=step, eps=float(hyper.eps))  # raises before any write
        if self.order is Order.MEGATRON:
            self._precondition_(states, factors, step)
            return self._update_(states, grads, hyper, count=step)
        updates = self._update_(states, grads, hyper, count=step - 1) if step > 1 else torch.zeros_like(grads)
        self._precondition_(states, factors, step)
        return updates

    def _update_(self, states: PartStates, grads: Tensor, hyper: Hyper, *, count: int) -> Tensor:
        sides = self.shampoo.sides(grads.shape)
        update = _adam_(states, into_basis(states, grads, sides), hyper, count=count)
        return out_of_basis(states, update, sides)

    def _precondition_(self, states: PartStates, factors: Mapping[str, Tensor], step: int) -> None:
        """Store the factors and, every `precondition_frequency` steps, update the bases and the moments in them."""
        for side, factor in factors.items():
            states.store_(side, factor)
        if (step - 1) % self.precondition_frequency == 0:
            turned = self.shampoo.turn_(states, factors, first=step == 1)
            _turn_moments_(states, turned, sorts=self.order is Order.PAPER)

    def only_finds_bases(self, hyper: Hyper) -> bool:
        """Whether this is the first step in the paper's order."""
        return self.order is Order.PAPER and int(hyper.step) == 1

    def apply_(self, task: Task, update: Tensor, skip: Tensor | None) -> None:
        """p <- p - lr wd p - lr update, except in a first step that only computes the bases."""
        hyper, work = task
        if skipped(skip) or self.only_finds_bases(hyper):
            return
        main = read_main(work)
        write_main_(work, main - hyper.lr * (decay_of(main, hyper.weight_decay) + update), None)


def _check_whole(work: Work) -> None:
    group = work.matrix.tensor_parallel
    if matrix_dim(work) is not None and group is not None and group.size > 1:
        raise MatrixError(
            f"SOAP needs whole matrices, but dim {work.matrix.partition_dim} of this one is cut over {group.size} "
            "tensor-parallel ranks; gather it before the rule, or use Muon with tp_mode 'distributed'"
        )


def _turn_moments_(states: PartStates, turned: Mapping[str, Turned], *, sorts: bool) -> None:
    """Rotate exp_avg into the new bases and, with `sorts`, reorder exp_avg_sq like their vectors."""
    exp_avg, exp_avg_sq = states.load("exp_avg"), states.load("exp_avg_sq")
    for side in (LEFT, RIGHT):
        if side in turned:
            exp_avg = turned[side].rotation @ exp_avg
            if sorts:
                exp_avg_sq = exp_avg_sq.gather(-2, turned[side].order.unsqueeze(-1).expand_as(exp_avg_sq))
        exp_avg, exp_avg_sq = exp_avg.mT, exp_avg_sq.mT  # the right side is the left one of the transpose
    states.store_("exp_avg", exp_avg)
    states.store_("exp_avg_sq", exp_avg_sq)


def _adam_(states: PartStates, grads: Tensor, hyper: Hyper, *, count: int) -> Tensor:
    """Adam's update number `count` for gradients in the bases; updates the moments."""
    beta1, beta2 = map(float, hyper.betas)
    exp_avg = states.load("exp_avg").lerp_(grads, 1.0 - beta1)
    exp_avg_sq = states.load("exp_avg_sq").mul_(beta2).addcmul_(grads, grads, value=1.0 - beta2)
    states.store_("exp_avg", exp_avg)
    states.store_("exp_avg_sq", exp_avg_sq)
    root = exp_avg_sq.div_(1.0 - beta2**count).sqrt_().add_(hyper.eps)
    return exp_avg.div_(1.0 - beta1**count).div_(root)
