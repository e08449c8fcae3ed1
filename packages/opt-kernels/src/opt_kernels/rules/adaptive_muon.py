"""AdaptiveMuon: Muon with a second moment of the orthogonalised update (AdaMuon, NorMuon) or of the gradient (NAMO)."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from opt_kernels.backends.dispatch import tensors_of, version
from opt_kernels.backends.elements import compute_dtype
from opt_kernels.codecs import Codecs, Plain
from opt_kernels.matrices import access
from opt_kernels.matrices.muon import Decay, Inputs
from opt_kernels.matrices.orthogonalization import TpMode
from opt_kernels.rules.base import GRAD_SQUARES, MatrixRule, Needs
from opt_kernels.rules.muon import MuonRule
from opt_kernels.works import Batch, NamedChoice, Scalar, Skip, StateKind, States, StateSpec, Task, Work

SECOND_MOMENT = "moment2_buffer"
SECOND_MOMENT_OF_COLS = "moment2_buffer_of_cols"


class SecondMoment(NamedChoice):
    """Over which elements the second moment is averaged."""

    ADAMUON = "adamuon"  # of every element
    ADAMUON_PAPER = "adamuon_paper"  # of every element, of the orthogonalised sign, with aligned root mean square
    NORMUON = "normuon"  # of every row or column: one number per neuron
    NAMO = "namo"  # of the gradient: one number per matrix


class Lines(NamedChoice):
    """The lines of a matrix (rows, cols) whose mean squares NorMuon keeps."""

    ROWS = "rows"  # the paper's: the neurons of y = Wx
    COLS = "cols"
    LONGER = "longer"  # Megatron-Core's: rows where rows >= cols, else columns


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveMuonRule(MatrixRule):
    """Muon whose orthogonal update O is divided by its own history. Of `Hyper`: Muon's, betas[1] = b2, and eps.

        adamuon   v <- v + (1 - b2)(O² - v);  U = O / (sqrt(v) + eps)                              (Megatron-Core's)
        adamuon_paper   the same with O = Newton-Schulz(sign(u));  U times sqrt(min(rows, cols)) / ‖U‖
                                                                                                 (arXiv 2507.11005)
        normuon   v <- v + (1 - b2)(mean of O² over a line - v);  U = O / sqrt(max(v, eps)), times ‖O‖ / ‖U‖
                                                                                                 (arXiv 2510.05491)
        namo      v <- v + (1 - b2)(‖g‖² - v), one number per matrix;  U = (‖u‖ / (sqrt(v) + eps)) O
                                                                      (arXiv 2602.17080, as in Emerging-Optimizers)
        p <- p - lr wd p - lr s e U

    without bias correction, as in Megatron-Core. Split rows are orthogonalised as separate matrices; norms, means and
    NAMO's v are those of all of them together, and min(rows, cols) is the sum of theirs.

    With "adamuon" elements of U are about 1, where those of O are about 1 / sqrt(max(rows, cols)), so a step is longer
    than Muon's at the same lr: about 100 times with the defaults. With "adamuon_paper" U has the norm of an orthogonal
    matrix, so that "match_rms_adamw" is the paper's scale.

    The scale s e is applied once, after the division: the division would remove the scale of a scaled O, or square it.
    The `lines` of NorMuon are rows by default, as in the paper. Lines and norms are those of the whole matrix, summed
    over tensor-parallel ranks in every mode.

    NAMO's ‖g‖² must fit float32: from norms of about 1e19 on the weights become NaN. It cannot be computed from the
    input of the orthogonalisation. If parts of matrices are gathered, as for FSDP2, their squares are summed besides
    (`sums_gradients`); in float64, so that v does not depend on the parts.

    Raises ValueError for lines other than rows without NorMuon, and for NAMO with L2 decay, which would be part of g.
    `update_` raises MatrixError for a part of a matrix whose state was created for the other lines, which happens with
    `lines="longer"`, and with NAMO for unequal parts of a matrix.
    """

    muon: MuonRule = field(default_factory=MuonRule)
    second_moment: SecondMoment = SecondMoment.ADAMUON
    lines: Lines = Lines.ROWS

    capturable = True  # a step reads no device tensor on the host

    def __post_init__(self) -> None:
        if self.second_moment is not SecondMoment.NORMUON and self.lines is not Lines.ROWS:
            raise ValueError(f"lines={self.lines.value!r} with {self.second_moment.value!r}: only 'normuon' has lines")
        if self.muon.nuclear_scale:
            raise ValueError(
                "nuclear_scale=True with a second moment, which divides by the scale of updates; leave it at False"
            )
        if self.sums_gradients and self.muon.weight_decay_method is Decay.L2:
            raise ValueError(
                "NAMO with L2 weight decay: its scale must depend on the gradient alone; use decoupled decay"
            )

    @property
    def name(self) -> str:
        return "namo" if self.sums_gradients else "adaptive_muon"

    needs = Needs.MATRICES

    @property
    def sums_gradients(self) -> bool:
        """Whether `transform_` needs ‖g‖² of whole matrices."""
        return self.second_moment is SecondMoment.NAMO

    @property
    def sums_over_blocks(self) -> bool:
        """Whether blocks share norms or means of lines."""
        return self.second_moment is not SecondMoment.ADAMUON

    @property
    def backend(self) -> str | None:
        """The backend of Muon."""
        return self.muon.backend

    @property
    def tp_mode(self) -> TpMode:
        """The mode of Muon."""
        return self.muon.tp_mode

    @property
    def codecs(self) -> Codecs:
        """The codecs of the states, by name."""
        return {**self.muon.codecs, **{spec.name: Plain() for spec in self._second_specs}}

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        return (*self.muon.state_specs, *self._second_specs)

    @property
    def _second_specs(self) -> tuple[StateSpec, ...]:
        if self.second_moment is SecondMoment.NAMO:
            return (StateSpec(name=SECOND_MOMENT, kind=StateKind.REDUCED, dims=(-2, -1), whole=True),)
        if self.second_moment is not SecondMoment.NORMUON:
            return (StateSpec(name=SECOND_MOMENT, whole=self.second_moment is SecondMoment.ADAMUON_PAPER),)
        optional = self.lines is Lines.LONGER
        rows = StateSpec(name=SECOND_MOMENT, kind=StateKind.REDUCED, dims=(-1,), whole=True, optional=optional)
        cols = replace(rows, name=SECOND_MOMENT_OF_COLS, dims=(-2,))
        if self.lines is Lines.LONGER:
            return rows, cols
        return (rows,) if self.lines is Lines.ROWS else (cols,)

    def init_state(self, main: Tensor) -> States:
        access.check_shape(main.shape)
        name = self._line_state(*main.shape[-2:])
        [spec] = [spec for spec in self._second_specs if spec.name == name]
        shape = spec.shape_for(main.shape)
        assert shape is not None
        second = torch.zeros(shape, dtype=torch.float32, device=main.device)
        return self.muon.init_state(main) | {name: second}

    def _line_state(self, rows: int, cols: int) -> str:
        """The name of the second moment of a matrix of this size, which differs for rows and columns."""
        of_cols = rows < cols if self.lines is Lines.LONGER else self.lines is Lines.COLS
        return SECOND_MOMENT_OF_COLS if of_cols else SECOND_MOMENT

    def update_(self, batches: Sequence[Batch], *, grad_scale: Scalar = 1.0, skip: Skip = None) -> None:
        if self.sums_gradients:
            batches = [Batch(hyper, [_with_squares(work, grad_scale) for work in works]) for hyper, works in batches]
        in_phases_ = version("muon", "in_phases_", backend=self.backend, tensors=tensors_of(batches))
        in_phases_(batches, self, grad_scale=grad_scale, skip=skip)

    def prepare_(self, task: Task, grad: Tensor, skip: Skip) -> None:
        """Update the momentum, as Muon does."""
        self.muon.prepare_(task, grad, skip)

    def update_dtype(self, dtype: torch.dtype, device: torch.device) -> torch.dtype:
        """Return the dtype of Newton-Schulz, if `transform_` returns O."""
        returns_directions = self.second_moment is SecondMoment.ADAMUON
        return self.muon.update_dtype(dtype, device) if returns_directions else dtype

    def apply_(self, task: Task, update: Tensor, skip: Skip) -> None:
        """Divide O by its second moment (AdaMuon), then update the weights as Muon does."""
        self.adapt_(task, update, skip)
        self.muon.apply_(task, update, skip)

    def inputs(self, work: Work) -> Inputs:
        """The format in which `transform_` prefers the matrices of a work: with norm and dtype where it reads them, or
        a class overrides it."""
        is_own = type(self).transform_ is AdaptiveMuonRule.transform_
        if not is_own or self.second_moment in (SecondMoment.ADAMUON_PAPER, SecondMoment.NAMO):
            return Inputs(compute_dtype(work), False)
        return self.muon.inputs(work)

    def transform_(self, tasks: Sequence[Task], inputs: Tensor, skip: Skip, *, normalised: bool = False) -> Tensor:
        """O, or U where it is one of the whole matrix; NAMO reads ‖g‖² from the state `GRAD_SQUARES`."""
        dtype = compute_dtype(tasks[0].work)
        size = access.whole_size(tasks[0].work)
        match self.second_moment:
            case SecondMoment.NAMO:
                factors = [_factor(task, u, skip) for task, u in zip(tasks, inputs)]
                updates = self.muon.directions(tasks, inputs, normalised).to(dtype)
                return updates.mul_(torch.stack(factors)[..., None, None])
            case SecondMoment.ADAMUON_PAPER:
                updates = self.muon.directions(tasks, inputs.sign(), False).to(dtype)
                for update, task in zip(updates, tasks):
                    self._divide_(task, update, skip)
                    norm = access.sum_of_squares(task.work, update).sqrt()
                    factor = _rank_of_parts(task.work) ** 0.5 / norm.clamp_min(task.hyper.eps)
                    update.mul_(factor[..., None, None])
                return updates
        updates = self.muon.directions(tasks, inputs, normalised).to(dtype)
        if self.second_moment is SecondMoment.NORMUON:
            name = self._line_state(*size)
            for update, task in zip(updates, tasks):
                _check_lines(task.work, name)
                dim = -1 if name == SECOND_MOMENT else -2
                second = _accumulated(task, name, _mean_square(task.work, update, dim), skip)
                # U = O / sqrt(max(v, eps)), then U <- U ‖O‖ / ‖U‖, with norms of the whole matrix.
                before = access.sum_of_squares(task.work, update).sqrt()
                update.mul_(second.unsqueeze(dim).clamp_min(task.hyper.eps).rsqrt_())
                after = access.sum_of_squares(task.work, update).sqrt()
                factor = before / after.clamp_min(task.hyper.eps)
                update.mul_(factor[..., None, None])
        return updates

    def adapt_(self, task: Task, update: Tensor, skip: Skip) -> None:
        """Divide O by its second moment, if that is not part of `transform_` (AdaMuon)."""
        if self.second_moment is SecondMoment.ADAMUON:
            self._divide_(task, update, skip)

    def _divide_(self, task: Task, update: Tensor, skip: Skip) -> None:
        """Divide each element by its second moment."""
        second = _accumulated(task, SECOND_MOMENT, update.square(), skip)
        update.div_(second.sqrt_().add_(task.hyper.eps))


def _rank_of_parts(work: Work) -> int:
    """The largest rank that the split parts of a whole matrix have together."""
    rows, cols = access.whole_size(work)
    sizes = work.matrix.split_rows or (rows,)
    repeats = rows // sum(sizes)
    if work.matrix.by_group:
        return repeats * sum(min(size, cols) for size in sizes)
    return sum(min(size * repeats, cols) for size in sizes)


def _accumulated(task: Task, name: str, squares: Tensor, skip: Skip) -> Tensor:
    """Update the second moment `name` and return it: v + (1 - b2)(squares - v)."""
    hyper, work = task
    second = access.read_state(work, name, Plain())
    second.lerp_(squares, access.weight_for(second, 1.0 - hyper.betas[1]))
    access.write_state_(work, name, Plain(), second, skip)
    return second


def _check_lines(work: Work, name: str) -> None:
    rows, cols = work.grad.shape[-2:]
    num_lines = rows if name == SECOND_MOMENT else cols
    second = work.state.get(name)
    if second is None or second.shape[-1:] != (num_lines,):
        raise access.MatrixError(
            f"lines='longer': this rank has a part {(rows, cols)} of a matrix {access.whole_size(work)}, whose longer "
            "dim is the other one; pass lines='rows' or 'cols', or tp_mode='duplicated'"
        )


def _mean_square(work: Work, update: Tensor, dim: int) -> Tensor:
    """The mean square of each row (`dim` -1) or column (-2) of the whole matrix, (*shape without `dim`)."""
    mean = update.square().mean(dim)
    cut = access.cut_of(work)
    if cut is None or cut.dim != dim:
        return mean
    return cut.ranks.all_reduce(mean) / cut.ranks.size


def _with_squares(work: Work, grad_scale: Scalar) -> Work:
    """The work with ‖g‖² of its local matrices as `GRAD_SQUARES`. Raises MatrixError for a part whose size does not
    follow from that of the whole."""
    if work.matrix.part is not None:
        raise access.MatrixError(
            f"NAMO with an unequal part of a matrix {work.matrix.part.whole_shape}: it needs ‖g‖² of the whole; "
            "pass moment2_method='normuon', or parts of equal size"
        )
    squares = access.squares_in_float64(work.grad.to(compute_dtype(work)) * grad_scale)
    return replace(work, state={**work.state, GRAD_SQUARES: squares})


def _factor(task: Task, u: Tensor, skip: Skip) -> Tensor:
    """‖u‖ / (sqrt(v) + eps), 0-d, or one number per matrix of a stack. Updates v."""
    hyper, work = task
    of_whole = access.over_peers(work, work.state[GRAD_SQUARES]).to(compute_dtype(work))
    second = _accumulated(task, SECOND_MOMENT, of_whole, skip)
    return access.sum_of_squares(work, u).sqrt() / second.sqrt_().add_(hyper.eps)
