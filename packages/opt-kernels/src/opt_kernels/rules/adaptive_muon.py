"""AdaptiveMuon: Muon with a second moment of the orthogonalised update, by element (AdaMuon) or by row (NorMuon)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from opt_kernels.choice import Choice
from opt_kernels.codecs import Plain, StateCodec
from opt_kernels.matrices.orthogonalization import TpMode
from opt_kernels.matrices.stacks import compute_dtype, matrix_dim, read_state, write_state_
from opt_kernels.rules.base import Needs
from opt_kernels.rules.muon import Muon
from opt_kernels.works import Batch, Hyper, StateKind, StateSpec, Task, Work

SECOND_MOMENT = "moment2_buffer"


class SecondMoment(Choice):
    """Of what the second moment is kept."""

    ADAMUON = "adamuon"  # of every element
    NORMUON = "normuon"  # of every row: one number a neuron


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveMuon:
    """Muon whose orthogonal update O is divided by its own history. Of `Hyper`: Muon's, betas[1] = b2, and eps.

        adamuon   v <- v + (1 - b2)(O² - v);  U = O / (sqrt(v) + eps)                            (arXiv 2507.11005)
        normuon   v <- v + (1 - b2)(mean of O² over a row - v);  U = O / sqrt(max(v, eps)), times ‖O‖ / ‖U‖
                                                                                                 (arXiv 2510.05491)
        p <- p - lr wd p - lr s e U

    without bias correction, as the reference has it. The scale s e is applied once, here: an O that was scaled before
    would have its scale divided out again, or squared. The reference averages over the columns of a wide matrix; we
    over rows always, as the paper does, so that the state has one shape whatever the shape of the part of the matrix
    that is here. Rows and norms are those of the whole matrix, summed over tensor-parallel ranks in every mode.
    """

    muon: Muon = field(default_factory=Muon)
    second_moment: SecondMoment = SecondMoment.ADAMUON

    @property
    def name(self) -> str:
        return "adaptive_muon"

    @property
    def needs(self) -> Needs:
        return Needs.MATRICES

    @property
    def codecs(self) -> dict[str, StateCodec]:
        """How each state is stored."""
        return self.muon.codecs | {SECOND_MOMENT: Plain()}

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        if self.second_moment is SecondMoment.ADAMUON:
            return (*self.muon.state_specs, StateSpec(name=SECOND_MOMENT))
        return (*self.muon.state_specs, StateSpec(name=SECOND_MOMENT, kind=StateKind.REDUCED, dims=(-1,), whole=True))

    def init_state(self, main: Tensor) -> dict[str, Tensor]:
        shape = main.shape if self.second_moment is SecondMoment.ADAMUON else main.shape[:-1]
        second = torch.zeros(shape, dtype=torch.float32, device=main.device)
        return self.muon.init_state(main) | {SECOND_MOMENT: second}

    @property
    def tp_mode(self) -> TpMode:
        """Muon's."""
        return self.muon.tp_mode

    def update_(
        self, batches: Sequence[Batch], *, grad_scale: float | Tensor = 1.0, skip: Tensor | None = None
    ) -> None:
        adapt_ = partial(self._divide_, skip=skip) if self.second_moment is SecondMoment.ADAMUON else None
        transform = partial(self._directions, skip=skip)
        self.muon.step_(batches, transform=transform, adapt_=adapt_, grad_scale=grad_scale, skip=skip)

    def prepare_(self, task: Task, grad: Tensor, skip: Tensor | None) -> None:
        """Muon's."""
        self.muon.prepare_(task, grad, skip)

    def transform_(self, tasks: Sequence[Task], inputs: Tensor, skip: Tensor | None) -> Tensor:
        """O; by row, divided by its history, and with its norm."""
        return self._directions(tasks, inputs, False, skip=skip)

    def apply_(self, task: Task, update: Tensor, skip: Tensor | None) -> None:
        """By element, divides O by its history; then Muon's."""
        if self.second_moment is SecondMoment.ADAMUON:
            self._divide_(task, update, skip=skip)
        self.muon.apply_(task, update, skip)

    def _directions(self, tasks: Sequence[Task], inputs: Tensor, normalised: bool, *, skip: Tensor | None) -> Tensor:
        updates = self.muon.directions(tasks, inputs, normalised).to(compute_dtype(tasks[0].work))
        if self.second_moment is SecondMoment.NORMUON:
            for update, task in zip(updates, tasks):
                second = self._seen(task, _row_mean(task.work, update), skip)
                _divide_rows_(task.work, update, second, task.hyper)
        return updates

    def _divide_(self, task: Task, update: Tensor, *, skip: Tensor | None) -> None:
        """By element."""
        second = self._seen(task, update.square(), skip)
        update.div_(second.sqrt_().add_(task.hyper.eps))

    def _seen(self, task: Task, squares: Tensor, skip: Tensor | None) -> Tensor:
        """v, with `squares` in it."""
        hyper, work = task
        second = read_state(work, SECOND_MOMENT, Plain()).lerp_(squares, 1.0 - hyper.betas[1])
        write_state_(work, SECOND_MOMENT, Plain(), second, skip)
        return second


def _row_mean(work: Work, update: Tensor) -> Tensor:
    """The mean square of each row of the whole matrix, (*shape without the last dim)."""
    mean = update.square().mean(-1)
    group = work.matrix.tensor_parallel
    if matrix_dim(work) != -1 or group is None:
        return mean
    return group.all_reduce(mean) / group.size


def _divide_rows_(work: Work, update: Tensor, second: Tensor, hyper: Hyper) -> None:
    """U = O / sqrt(max(v, eps)), then U <- U ‖O‖ / ‖U‖, the norms being those of the whole matrix."""
    before = _sum_of_squares(work, update)
    update.mul_(second.clamp_min(hyper.eps).rsqrt_().unsqueeze(-1))
    after = _sum_of_squares(work, update)
    update.mul_((before.sqrt() / after.sqrt().clamp_min(hyper.eps))[..., None, None])


def _sum_of_squares(work: Work, update: Tensor) -> Tensor:
    """‖·‖² of each matrix of `update`, whole: a 0-d tensor, or one number for each matrix of a stack."""
    squares = update.square().sum((-2, -1))
    group = work.matrix.tensor_parallel
    return squares if matrix_dim(work) is None or group is None else group.all_reduce(squares)
