"""`TensorSums`: norms of the gradient, weight and update of every parameter, in the steps that record them.

A recorded step reads gradients, main weights and updates once more, and keeps a copy of the main weights that this rank
counts until they are updated. Every rank adds up the elements that it counts; one all-reduce of one float64 tensor,
eight numbers a parameter and one a rank, gives all of them the numbers of the whole model. Other steps do nothing here.
The host reads the sums later, from a copy.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from opt_distributed.buffers import SyncedBuffer, naming
from opt_distributed.comm import Roles, from_all_replicas
from opt_distributed.comm import device as devices
from opt_distributed.pieces import BufferedGrads, HostMain, OwnedPiece, Ready, is_sparse
from opt_distributed.step import Family, Outcome, Unit
from opt_kernels import backends
from opt_kernels.rules import Needs
from opt_paramgroups import ParamId, aligned
from opt_stack.diagnosis.forward import ForwardWatch
from opt_stack.wording import ranks_text

# The columns of a parameter's sums: three of the gradient, two of the weight and of the update, and the spread.
GRAD = 0
WEIGHT = 3
UPDATE = 5
SPREAD = 7
NUM_COLUMNS = 8
NUM_COUNTS = 4  # before the sums of ranks: 1 / loss scale, overflowed module, number of the next update, ranks with it
UNKNOWN = -1.0  # in place of a sum of squares

Settings = Mapping[str, Mapping[str, float]]


class TensorStats(NamedTuple):
    """The numbers of one parameter, or of all parameters of a group, over all ranks. Norms are L2 norms."""

    grad_norm: float | None  # of the mean gradient, without loss scale, before clipping; None without a gradient
    weight_norm: float  # of the main weights before the update
    update_norm: float | None  # of the change of the main weights; None in a step that was skipped
    zeros: float | None  # share of the gradient's elements that are 0
    numel: int
    spread: float | None = None  # largest / smallest singular value of the weight, if it was asked for
    # Sums of elements: of the main weights before the update, and of their change; None in older recordings.
    weight_sum: float | None = None
    update_sum: float | None = None

    @property
    def ratio(self) -> float | None:
        """`update_norm / weight_norm`; None if there was no update, or the weight was zero."""
        return self.update_norm / self.weight_norm if self.update_norm is not None and self.weight_norm else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """The numbers of one step, equal on every rank, except for `overflowed`."""

    step: int  # of the optimizer, from 1; a resumed run continues from the updates that it has loaded
    updates: int  # made to the parameters before, also by earlier runs that were loaded
    success: bool
    reason: str  # why it was skipped, as in `Report`; "" if it was not
    grad_norm: float
    clip: float  # the factor of gradients, without loss scale
    loss_scale: float
    params: Mapping[str, TensorStats] = field(repr=False)
    groups: Mapping[str, TensorStats] = field(repr=False)
    # Norm of each rank's gradients before the mean over ranks; None where it was not measured, as with shards of
    # DTensors, and with a wrapped model in the first recorded step.
    rank_norms: Mapping[int, float | None] = field(repr=False)
    replicas_of: Mapping[int, int] = field(repr=False)  # by rank: the first rank with the same dense parameters
    # The numbers of each group that the host knows, such as `lr` and `beta1`; `clip_grad` is under "".
    settings: Settings = field(repr=False, default_factory=dict)
    loss: float | None = None  # mean of those that all ranks noted (`Optimizer.note_loss`); None if none was

    overflowed: str = ""  # with `forward`: the first module that overflowed in the forward passes of this rank

    @property
    def lr(self) -> dict[str, float]:
        """The learning rate of each group, where the host knows it."""
        return {group: numbers["lr"] for group, numbers in self.settings.items() if "lr" in numbers}

    @property
    def grad_norms(self) -> dict[str, float]:
        """The gradient norm of each parameter that had a gradient."""
        return {name: of.grad_norm for name, of in self.params.items() if of.grad_norm is not None}

    def __str__(self) -> str:
        rows = [("", "gradient", "weight", "update", "update/weight", "zeros")]
        for name, of in {**self.groups, **self.params}.items():
            numbers = (of.grad_norm, of.weight_norm, of.update_norm, of.ratio, of.zeros)
            shown = ("-" if number is None else f"{number:.3g}" for number in numbers)
            rows.append((name, *shown))  # type: ignore[arg-type]
        outcome = "applied" if self.success else f"skipped: {self.reason}"
        head = f"step {self.step} ({outcome}): norm {self.grad_norm:.4g}, clip factor {self.clip:.3g}"
        return "\n".join([f"{head}, loss scale {self.loss_scale:g}", *aligned(rows)])


Key = TypeVar("Key")
Value = TypeVar("Value")


def non_finite(norms: Mapping[Key, float | None]) -> list[Key]:
    """Return the keys of norms that are NaN or infinite. None is a norm that was not measured."""
    return [key for key, norm in norms.items() if norm is not None and not math.isfinite(norm)]


def fault(norm: float, stats: StepStats | None) -> str:
    """Say where the gradients of a step overflowed, in the model and on which ranks; only how, without its numbers."""
    norms = stats.grad_norms if stats is not None else {}
    what = "NaN" if any(map(math.isnan, (norm, *norms.values()))) else "infinite values"
    text = f"{what} in the gradient"
    if stats is None:
        return text
    bad = non_finite(norms)
    if not bad:
        return f"{text} in a copy that norms do not count"
    if 1 < len(bad) == len(norms):
        text += f" of all {len(bad)} parameters"
    else:
        text += f" of {bad[-1]!r}"
        if len(bad) > 1:
            text += f" and of {len(bad) - 1} before it in the model, to which backward spread it"
    ranks = non_finite(stats.rank_norms)
    return f"{text}, on {ranks_text(ranks)} before the mean over ranks" if ranks else text


def by_rank(roles: Roles, value: Value) -> dict[int, Value]:
    """Gather a value of each rank of all optimizer instances. Collective."""
    here = roles.totals.gather_objects((roles.everyone.rank, value))
    return dict(chain.from_iterable(roles.dense.inter.gather_objects(here)))


Row = tuple[str, int]
"""A parameter of the whole model, and the first rank that holds it: pipeline stages and experts may have different
parameters of one name."""


class TensorSums:
    """The parameters of the whole model, and their sums in one step at a time. Every rank makes the same calls."""

    def __init__(
        self,
        units: Sequence[Unit],
        families: Sequence[Family],
        group_names: Sequence[str],
        *,
        order: Sequence[ParamId],  # of the parameters in the model
        roles: Roles,
        device: devices.Device,
    ):
        """Gather the parameters of all ranks, with their groups, sizes and first ranks, and find the ranks that hold
        the same dense ones. Collective."""
        self._units = units
        self._sources = [source for family in families for source in family.sources]
        self._roles = roles
        self._device = device
        self.watch_forward(None)
        rank = roles.everyone.rank
        first_of: dict[ParamId, int] = {}
        first_replica = rank
        for family in reversed(families):  # dense parameters last
            first_replica = min(from_all_replicas(family.axes, rank))
            first = min(family.axes.tp.gather_objects(first_replica))
            for source in family.sources:
                first_of |= dict.fromkeys(source.params, first)
        # By rank: the first of the ranks that hold the same dense parameters.
        self.replicas_of = by_rank(roles, first_replica)
        self._rank_at = NUM_COUNTS + list(self.replicas_of).index(rank)
        self._num_before = NUM_COUNTS + len(self.replicas_of)  # the sums of parameters
        counted = {piece.id: piece for unit in units for piece in unit.pieces if piece.counted}
        self._pieces = [counted[id] for id in order if id in counted]
        local = []
        for piece in self._pieces:
            first = first_of[piece.id]
            mesh = getattr(piece.param, "device_mesh", None)
            if mesh is not None:
                first = min(first, int(mesh.mesh.min()))
            local.append(((str(piece.id), first), group_names[piece.group], piece.main.shape.numel()))
        found: dict[Row, tuple[str, int]] = {}
        for of_rank in roles.totals.gather_objects(local):
            for row, group, numel in of_rank:
                _, known = found.get(row, (group, 0))
                found[row] = (group, known + numel)
        index_of = {row: at for at, row in enumerate(found)}
        self._row_of = {piece.id: index_of[row] for piece, (row, *_) in zip(self._pieces, local, strict=True)}
        holders = Counter(name for name, _ in found)
        # Of the whole model: name, group and size.
        self.params = []
        for (name, holder), (group, numel) in found.items():
            shown = name if holders[name] == 1 else f"{name} (rank {holder})"
            self.params.append((shown, group, numel))

    def watch_forward(self, model: nn.Module | None) -> None:
        """Find the first module of a model that overflows in the forward passes before each step."""
        self._forward = ForwardWatch(model, self._device.torch_device)

    def expect(self, is_due: bool) -> None:
        """Note whether the next step is recorded: wrapped models reduce gradients before it, so that the norms of each
        rank are computed then."""
        if self._forward.names:
            self._forward.first.zero_()
        for source in self._sources:
            if isinstance(source, SyncedBuffer):
                source.memory.local_squares = {} if is_due else None

    def begin(self, ready: Sequence[Ready], inverse: float | Tensor, *, updates: bool, spectrum: bool = False) -> None:
        """Add up gradients and main weights, before the update. `inverse` is 1 / loss scale; with `updates`, an update
        follows; with `spectrum`, singular values are computed of the matrices of matrix rules, in float32."""
        num_sums = self._num_before + NUM_COLUMNS * len(self.params)
        self._sums = torch.zeros(num_sums, dtype=torch.float64, device=self._device.torch_device)
        self._table = self._sums[self._num_before :].view(-1, NUM_COLUMNS)
        self._before: list[tuple[OwnedPiece, Tensor]] = []  # main weights before the update
        self._inverse = inverse
        for unit_grads in ready:
            for piece, grad in zip(unit_grads.pieces, unit_grads.grads, strict=True):
                if piece.counted and grad.numel():
                    found = backends.grad_stats([grad])
                    square = found.sum_of_squares * piece.source.grad_scale**2
                    self._add(piece.id, GRAD, square, found.zeros, grad.numel())
        for piece in self._pieces:
            if piece.main.shape.numel():
                value = _weights(piece)
                self._add(piece.id, WEIGHT, *_sums(value))
                if updates:
                    self._before.append((piece, value.detach().clone()))
        if spectrum:
            self._add_spreads()
        if self._pieces:
            self._sums[2].add_(self._pieces[0].count.next())
            self._sums[3].add_(1.0)
        squares = list(self._local_squares()) if len(self.replicas_of) > 1 else []
        for square in squares:
            self._sums[self._rank_at].add_(square)
        if not squares:
            self._sums[self._rank_at].fill_(UNKNOWN)

    def num_updates(self) -> int:
        """Return the number of updates that were made to this rank's parameters, for which the host waits."""
        return max((piece.step for piece in self._pieces[:1]), default=0)

    def _add(self, id: ParamId, column: int, *values: Tensor | float) -> None:
        """Add to columns of a parameter, from one on."""
        for at, value in enumerate(values, column):
            self._table[self._row_of[id], at].add_(value)

    def _local_squares(self) -> Iterator[Tensor]:
        """Yield sums of squares of this rank's gradients before the reduction, where they are known."""
        for source in self._sources:
            if isinstance(source, SyncedBuffer):
                yield from (source.memory.local_squares or {}).values()
            elif isinstance(source, BufferedGrads):
                grads = [param.grad for param in source.params.values() if param.grad is not None]
                if dense := [grad for grad in grads if not is_sparse(grad)]:
                    yield backends.grad_stats(dense, count_zeros=False).sum_of_squares

    def finish(self) -> devices.HostCopy:
        """Add up the updates, and sum over ranks. Return the sums for `read`.

        Raises CollectiveError if a peer is lost."""
        for piece, before in self._before:
            exact = before.to(torch.promote_types(before.dtype, torch.float32))
            self._add(piece.id, UPDATE, *_sums(exact.neg_().add_(_weights(piece))))
        self._before = []
        with naming("sum of recorded statistics"):
            self._roles.totals.all_reduce_(self._sums)
            if len(self.replicas_of) > self._roles.totals.size:  # ranks of other instances
                self._roles.dense.inter.all_reduce_(self._sums[NUM_COUNTS : self._num_before])
        self._sums[:1] = self._inverse
        self._sums[1] = self._forward.first
        return devices.HostCopy(self._sums, self._device)

    def _add_spreads(self) -> None:
        for piece in (piece for unit in self._units if unit.rule.needs is Needs.MATRICES for piece in unit.pieces):
            value = piece.main.value()
            is_counted = piece.counted and not piece.matrix.tensor_parallel
            if piece.stage is not None:
                wholes = piece.stage.start_gather({piece.id: value}).finish()
                value = wholes.get(piece.id, value)
                is_counted = piece.stage.computes(piece.id)
            if is_counted and piece.id in self._row_of:
                matrix = value.detach().float().reshape(-1, value.shape[-1])
                # The decomposition raises for values that are not finite, on the ranks that have them.
                values = torch.linalg.svdvals(matrix.nan_to_num(0.0, 0.0, 0.0))
                self._add(piece.id, SPREAD, torch.where(matrix.isfinite().all(), values[0] / values[-1], math.nan))

    def read(self, copy: devices.HostCopy, outcome: Outcome, settings: Settings, num_loaded: int) -> StepStats:
        """Return the numbers of a step, for which the host waits. Earlier runs made at least `num_loaded` updates."""
        inverse, first, next_updates, num_counts, *numbers = copy.wait().tolist()
        report = outcome.resolve()
        rest = iter(numbers)
        rank_norms = {
            rank: math.sqrt(square) * inverse if square != UNKNOWN else None
            for rank, square in zip(self.replicas_of, rest, strict=False)
        }
        params = {}
        rows_of: dict[str, list[Sequence[float]]] = {}
        for name, group, numel in self.params:
            row = [*islice(rest, NUM_COLUMNS), numel]
            params[name] = _tensor_stats([row], inverse, success=report.success)
            rows_of.setdefault(group, []).append(row)
        groups = {group: _tensor_stats(rows, inverse, success=report.success) for group, rows in rows_of.items()}
        grad_norm = report.norms[0]
        max_norm = settings[""]["clip_grad"]
        clip = 1.0
        if math.isfinite(grad_norm) and max_norm > 0:
            clip = min(max_norm / (grad_norm + 1e-6), 1.0)  # `clip_coefficients`, without the device
        updates = round(next_updates / num_counts) - 1 if num_counts else 0
        step = max(outcome.step + num_loaded, updates + 1)
        overflowed = self._forward.names[int(first) - 1] if first else ""
        return StepStats(
            step=step,
            updates=updates,
            success=report.success,
            reason=report.reason,
            grad_norm=grad_norm,
            clip=clip,
            loss_scale=1.0 / inverse,
            params=params,
            groups=groups,
            rank_norms=rank_norms,
            replicas_of=self.replicas_of,
            settings=settings,
            loss=report.loss,
            overflowed=overflowed,
        )


def _tensor_stats(rows: Sequence[Sequence[float]], inverse: float, *, success: bool) -> TensorStats:
    """Return the numbers of the parameters whose sums are `rows`, together."""
    columns = zip(*rows, strict=True)
    grad, zeros, grad_numel, weight, weight_sum, update, update_sum, spread, numel = map(sum, columns)
    grad_norm = math.sqrt(grad) * inverse if grad_numel else None
    share_of_zeros = zeros / grad_numel if grad_numel else None
    spread_of_one = spread if spread and len(rows) == 1 else None
    return TensorStats(
        grad_norm=grad_norm,
        weight_norm=math.sqrt(weight),
        update_norm=math.sqrt(update) if success else None,
        zeros=share_of_zeros,
        numel=int(numel),
        spread=spread_of_one,
        weight_sum=weight_sum,
        update_sum=update_sum if success else None,
    )


def _weights(piece: OwnedPiece) -> Tensor:
    """Return the main weights, or the parameter on the device if its main weights are on the host."""
    return piece.main.target if isinstance(piece.main, HostMain) else piece.main.value()


def _sums(value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of squares, and of the elements."""
    value = value.detach()
    square = backends.grad_stats([value], count_zeros=False).sum_of_squares
    return square, value.sum(dtype=torch.float64)
