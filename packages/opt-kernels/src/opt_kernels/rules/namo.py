"""NAMO: Muon with one adaptive scale per matrix."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from opt_kernels.codecs import Plain, StateCodec
from opt_kernels.matrices.muon import Decay, Inputs
from opt_kernels.matrices.stacks import MatrixError, check_shape, compute_dtype, sum_of_squares
from opt_kernels.rules.adaptive_muon import SECOND_MOMENT, AdaptiveMuon, Lines, SecondMoment, accumulated
from opt_kernels.rules.base import Needs
from opt_kernels.rules.muon import Muon
from opt_kernels.works import Batch, StateKind, StateSpec, Task, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class NAMO:
    """Norm-based adaptive moment orthogonalisation (arXiv 2602.17080), as in Emerging-Optimizers.

        v <- v + (1 - b2)(‖g‖² - v)                            one number per matrix
        p <- p - lr wd p - lr s e (‖u‖ / (sqrt(v) + eps)) O

    g, u, O, s and e are those of Muon. Reads from `Hyper` the numbers of Muon, betas[1] = b2, and eps. There is no bias
    correction. Norms are Frobenius norms of whole matrices, summed over tensor-parallel ranks in every mode.

    ‖g‖ cannot be computed from the input of the orthogonalisation, so this is not a `MatrixRule`: parts of matrices
    cannot be gathered for it, as FSDP2 requires. Raises ValueError for L2 decay, which would be part of g. `update_`
    raises MatrixError for unequal parts of a matrix.
    """

    muon: Muon = field(default_factory=Muon)

    def __post_init__(self) -> None:
        if self.muon.weight_decay_method is Decay.L2:
            raise ValueError(
                "NAMO with L2 weight decay: its scale must depend on the gradient alone; give decoupled decay"
            )

    capturable: ClassVar[bool] = True  # a step reads no device tensor on the host

    @property
    def name(self) -> str:
        return "namo"

    @property
    def needs(self) -> Needs:
        return Needs.MATRICES

    @property
    def backend(self) -> str | None:
        """The backend of Muon."""
        return self.muon.backend

    @property
    def codecs(self) -> dict[str, StateCodec]:
        """The codecs of the states, by name."""
        return self.muon.codecs | {SECOND_MOMENT: Plain()}

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        second = StateSpec(name=SECOND_MOMENT, kind=StateKind.REDUCED, dims=(-2, -1))
        return (*self.muon.state_specs, second)

    def init_state(self, main: Tensor) -> dict[str, Tensor]:
        check_shape(main.shape)
        second = torch.zeros(main.shape[:-2], dtype=torch.float32, device=main.device)
        return self.muon.init_state(main) | {SECOND_MOMENT: second}

    def update_(
        self, batches: Sequence[Batch], *, grad_scale: float | Tensor = 1.0, skip: Tensor | None = None
    ) -> None:
        transform = partial(self._directions, grad_scale=grad_scale, skip=skip)
        self.muon.step_(
            batches, transform=transform, adapt_=None, grad_scale=grad_scale, skip=skip, inputs=_unnormalised
        )

    def _directions(
        self,
        tasks: Sequence[Task],
        inputs: Tensor,
        normalised: bool,
        *,
        grad_scale: float | Tensor,
        skip: Tensor | None,
    ) -> Tensor:
        """(‖u‖ / (sqrt(v) + eps)) O of works of one layout."""
        dtype = compute_dtype(tasks[0].work)
        factors = [self._factor(task, u, grad_scale, skip) for task, u in zip(tasks, inputs)]
        updates = self.muon.directions(tasks, inputs, normalised).to(dtype)
        return updates.mul_(torch.stack(factors)[..., None, None])

    def _factor(self, task: Task, u: Tensor, grad_scale: float | Tensor, skip: Tensor | None) -> Tensor:
        """‖u‖ / (sqrt(v) + eps), 0-d, or one number per matrix of a stack. Updates v."""
        hyper, work = task
        if work.matrix.part is not None:
            raise MatrixError(
                f"NAMO with an unequal part of a matrix {work.matrix.part.whole_shape}: it needs ‖g‖ of the whole; "
                "give moment2_method='normuon', or parts of equal size"
            )
        grad = work.grad.to(compute_dtype(work)) * grad_scale
        second = accumulated(task, SECOND_MOMENT, sum_of_squares(work, grad), skip)
        return sum_of_squares(work, u).sqrt() / second.sqrt_().add_(hyper.eps)


def _unnormalised(work: Work) -> Inputs:
    """Inputs that keep their norm, because it is part of the update."""
    return Inputs(compute_dtype(work), False)


def adaptive_rule(muon: Muon, method: str, *, lines: Lines = Lines.ROWS) -> AdaptiveMuon | NAMO:
    """The rule for a value of Megatron-Core's `adaptive_muon_moment2_method`: adamuon, normuon or namo.

    Raises ValueError for any other name, and for `lines` without normuon.
    """
    if method == "namo" and lines is not Lines.ROWS:
        raise ValueError(f"lines={lines.value!r} with 'namo': only 'normuon' has lines")
    if method not in (*SecondMoment, "namo"):
        raise ValueError(f"moment2_method={method!r} is unknown; give 'adamuon', 'normuon' or 'namo'")
    return (
        NAMO(muon=muon)
        if method == "namo"
        else AdaptiveMuon(muon=muon, second_moment=SecondMoment(method), lines=lines)
    )
