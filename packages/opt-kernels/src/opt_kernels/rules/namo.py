"""NAMO: Muon with one adaptive scale per matrix."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from opt_kernels.matrices.muon import Decay
from opt_kernels.matrices.stacks import (
    MatrixError,
    check_shape,
    compute_dtype,
    over_peers,
    squares_in_float64,
    sum_of_squares,
)
from opt_kernels.rules.adaptive_muon import (
    SECOND_MOMENT,
    AdaptiveMuonRule,
    Lines,
    MuonWithSecondMoments,
    SecondMoment,
    accumulated,
    unnormalised,
)
from opt_kernels.rules.base import GRAD_SQUARES
from opt_kernels.rules.muon import MuonRule
from opt_kernels.works import Batch, StateKind, StateSpec, Task, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class NAMORule(MuonWithSecondMoments):
    """Norm-based adaptive moment orthogonalisation (arXiv 2602.17080), as in Emerging-Optimizers.

        v <- v + (1 - b2)(‖g‖² - v)                            one number per matrix
        p <- p - lr wd p - lr s e (‖u‖ / (sqrt(v) + eps)) O

    g, u, O, s and e are those of Muon. Reads from `Hyper` the numbers of Muon, betas[1] = b2, and eps. There is no bias
    correction. Norms are Frobenius norms of whole matrices, summed over tensor-parallel ranks in every mode. ‖g‖² must
    fit float32: from norms of about 1e19 on the weights become NaN.

    ‖g‖ cannot be computed from the input of the orthogonalisation. If parts of matrices are gathered, as for FSDP2,
    their squares are summed besides (`sums_gradients`); in float64, so that v does not depend on the parts. Raises
    ValueError for L2 decay, which would be part of g. `update_` raises MatrixError for unequal parts of a matrix.
    """

    def __post_init__(self) -> None:
        if self.muon.weight_decay_method is Decay.L2:
            raise ValueError(
                "NAMO with L2 weight decay: its scale must depend on the gradient alone; use decoupled decay"
            )

    sums_gradients: ClassVar[bool] = True  # `transform_` needs ‖g‖² of whole matrices

    @property
    def name(self) -> str:
        return "namo"

    @property
    def second_specs(self) -> tuple[StateSpec, ...]:
        return (StateSpec(name=SECOND_MOMENT, kind=StateKind.REDUCED, dims=(-2, -1), whole=True),)

    def init_state(self, main: Tensor) -> dict[str, Tensor]:
        check_shape(main.shape)
        second = torch.zeros(main.shape[:-2], dtype=torch.float32, device=main.device)
        return self.muon.init_state(main) | {SECOND_MOMENT: second}

    def update_(
        self, batches: Sequence[Batch], *, grad_scale: float | Tensor = 1.0, skip: Tensor | None = None
    ) -> None:
        def transform(tasks: Sequence[Task], inputs: Tensor, normalised: bool) -> Tensor:
            squares = [_squares(task.work, grad_scale) for task in tasks]
            return self._directions(tasks, inputs, normalised, squares, skip)

        self.muon.step_(
            batches, transform=transform, adapt_=None, grad_scale=grad_scale, skip=skip, inputs=unnormalised
        )

    def transform_(self, tasks: Sequence[Task], inputs: Tensor, skip: Tensor | None) -> Tensor:
        """(‖u‖ / (sqrt(v) + eps)) O, with ‖g‖² from the state `GRAD_SQUARES`."""
        squares = [task.work.state[GRAD_SQUARES] for task in tasks]
        return self._directions(tasks, inputs, False, squares, skip)

    def _directions(
        self, tasks: Sequence[Task], inputs: Tensor, normalised: bool, squares: Sequence[Tensor], skip: Tensor | None
    ) -> Tensor:
        """(‖u‖ / (sqrt(v) + eps)) O of works of one layout. `squares` are ‖g‖² of the local matrices."""
        dtype = compute_dtype(tasks[0].work)
        factors = [_factor(task, u, of_grad, skip) for task, u, of_grad in zip(tasks, inputs, squares)]
        updates = self.muon.directions(tasks, inputs, normalised).to(dtype)
        return updates.mul_(torch.stack(factors)[..., None, None])


def _squares(work: Work, grad_scale: float | Tensor) -> Tensor:
    """‖g‖² of the work. Raises MatrixError for a part whose size does not follow from that of the whole."""
    if work.matrix.part is not None:
        raise MatrixError(
            f"NAMO with an unequal part of a matrix {work.matrix.part.whole_shape}: it needs ‖g‖² of the whole; "
            "pass moment2_method='normuon', or parts of equal size"
        )
    return squares_in_float64(work.grad.to(compute_dtype(work)) * grad_scale)


def _factor(task: Task, u: Tensor, squares: Tensor, skip: Tensor | None) -> Tensor:
    """‖u‖ / (sqrt(v) + eps), 0-d, or one number per matrix of a stack. Updates v."""
    hyper, work = task
    of_whole = over_peers(work, squares).to(compute_dtype(work))
    second = accumulated(task, SECOND_MOMENT, of_whole, skip)
    return sum_of_squares(work, u).sqrt() / second.sqrt_().add_(hyper.eps)


def adaptive_rule(muon: MuonRule, method: str, *, lines: Lines = Lines.ROWS) -> AdaptiveMuonRule | NAMORule:
    """The rule for a value of Megatron-Core's `adaptive_muon_moment2_method`, or "adamuon_paper".

    Raises ValueError for any other name, and for `lines` without normuon.
    """
    if method == "namo" and lines is not Lines.ROWS:
        raise ValueError(f"lines={lines.value!r} with 'namo': only 'normuon' has lines")
    if method not in (*SecondMoment, "namo"):
        raise ValueError(f"moment2_method={method!r} is unknown; pass 'adamuon', 'adamuon_paper', 'normuon' or 'namo'")
    return (
        NAMORule(muon=muon)
        if method == "namo"
        else AdaptiveMuonRule(muon=muon, second_moment=SecondMoment(method), lines=lines)
    )
