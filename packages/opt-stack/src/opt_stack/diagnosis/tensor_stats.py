"""`TensorSums`: norms of the gradient, weight and update of every parameter, in the steps that record them.

A recorded step reads gradients, main weights and updates once more, and keeps a copy of the main weights that this rank
counts until they are updated. Every rank adds up the elements that it counts; one all-reduce of one float64 tensor,
eight numbers a parameter and two a rank, gives all of them the numbers of the whole model. Other steps do nothing here.
The host reads the sums later, from a copy.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from opt_distributed.buffers import SyncedBuffer, naming
from opt_distributed.comm import Roles
from opt_distributed.comm import device as devices
from opt_distributed.pieces import BufferedGrads, HostMain, OwnedPiece, Ready, is_sparse
from opt_distributed.step import Family, Outcome, Report, Unit
from opt_kernels import backends
from opt_kernels.rules import Needs
from opt_paramgroups import ParamId, aligned

OVERFLOW = "overflow"
ABOVE_LIMIT = "norm above the limit"
SPIKE = "spike of the norm"
BAD_LOSS = "spike of the loss"  # or a loss that is infinite or NaN
REASONS = (OVERFLOW, ABOVE_LIMIT, SPIKE, BAD_LOSS)

# The columns of a parameter's sums.
GRAD, ZEROS, GRAD_NUMEL, WEIGHT, UPDATE, SPREAD, WEIGHT_SUM, UPDATE_SUM = range(8)
NUM_COLUMNS = 8


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
    """The numbers of one step, equal on every rank."""

    step: int  # of the optimizer, from 1; a resumed run continues from the updates that it has loaded
    updates: int  # made to the parameters before, also by earlier runs that were loaded
    success: bool
    reason: str  # why it was skipped, one of `REASONS`; "" if it was not
    grad_norm: float
    clip: float  # the factor of gradients, without loss scale
    loss_scale: float
    params: Mapping[str, TensorStats] = field(repr=False)
    groups: Mapping[str, TensorStats] = field(repr=False)
    # Norm of each rank's gradients before the mean over ranks; None where it was not measured, as with shards of
    # DTensors, and with a wrapped model in the first recorded step.
    rank_norms: Mapping[int, float | None] = field(repr=False)
    replicas_of: Mapping[int, int] = field(repr=False)  # by rank: the first rank with the same dense parameters
    lr: Mapping[str, float] = field(repr=False, default_factory=dict)  # by group, where the host knows it
    # Numbers of each group other than `lr`, such as `beta1` and `weight_decay`; `clip_grad` is under "".
    settings: Mapping[str, Mapping[str, float]] = field(repr=False, default_factory=dict)
    loss: float | None = None  # mean of those that all ranks noted (`Optimizer.note_loss`); None if none was

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


def reason_of(report: Report) -> str:
    """Return the first of `REASONS` for which a step was skipped; "" if there is none."""
    has_reason = (report.overflow, report.is_above_limit, report.is_spike, report.is_bad_loss)
    return next((reason for reason, holds in zip(REASONS, has_reason, strict=True) if holds), "")


Key = TypeVar("Key")


def non_finite(norms: Mapping[Key, float | None]) -> list[Key]:
    """Return the keys of norms that are NaN or infinite. None is a norm that was not measured."""
    return [key for key, norm in norms.items() if norm is not None and not math.isfinite(norm)]


class Row(NamedTuple):
    """A parameter of the whole model. Pipeline stages and experts may have different parameters of one name."""

    name: str
    place: int  # the first rank that holds it


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
        device: torch.device,
    ):
        """Gather the parameters of all ranks. Collective."""
        self._units = units
        self._sources = [source for family in families for source in family.sources]
        self._everyone = everyone = roles.totals
        self._instances = instances = roles.dense.inter
        self._device = device
        self._queues = devices.device_of(device)
        rank = roles.everyone.rank
        first_of: dict[ParamId, int] = {}
        first_replica = rank
        for family in reversed(families):  # dense parameters last
            axes = family.axes
            first_shard = min(axes.dp.gather_objects(rank))
            first_replica = min(axes.inter.gather_objects(first_shard))
            first = min(axes.tp.gather_objects(first_replica))
            for source in family.sources:
                first_of |= dict.fromkeys(source.params, first)
        place = {id: at for at, id in enumerate(order)}
        counted = (piece for unit in units for piece in unit.pieces if piece.counted)
        self._pieces = sorted(counted, key=lambda piece: place[piece.id])
        rows: dict[ParamId, Row] = {}
        local = []
        for piece in self._pieces:
            first = first_of[piece.id]
            mesh = getattr(piece.param, "device_mesh", None)
            if mesh is not None:
                first = min(first, int(mesh.mesh.min()))
            rows[piece.id] = row = Row(str(piece.id), first)
            group = group_names[piece.group]
            local.append((row, group, piece.main.shape.numel()))
        self.numels: dict[Row, int] = {}
        self.group_of: dict[Row, str] = {}
        for of_rank in everyone.gather_objects(local):
            for row, group, numel in of_rank:
                self.numels[row] = self.numels.get(row, 0) + numel
                self.group_of[row] = group
        index_of = {row: at for at, row in enumerate(self.numels)}
        self._row_of = {id: index_of[row] for id, row in rows.items()}
        holders = Counter(row.name for row in self.numels)
        self.names = []
        for name, holder in self.numels:
            is_unique = holders[name] == 1
            self.names.append(name if is_unique else f"{name} (rank {holder})")
        here = everyone.gather_objects((rank, first_replica))
        # By rank: the first of the ranks that hold the same dense parameters.
        self.replicas_of: dict[int, int] = {}
        for of_instance in instances.gather_objects(here):
            self.replicas_of |= dict(of_instance)
        self._has_ranks_elsewhere = len(self.replicas_of) > len(here)  # in other instances
        num_before = list(self.replicas_of).index(rank)
        self._rank_at = NUM_COLUMNS * len(self.names) + 2 * num_before
        # Of a step that has begun: an index, and what is added there; a number if the host knows it.
        self._entries: list[tuple[int, Tensor | float]] = []
        self._before: list[tuple[OwnedPiece, Tensor]] = []  # its main weights
        self._inverse: float | Tensor = 1.0

    def expect(self, is_due: bool) -> None:
        """Note whether the next step is recorded: wrapped models reduce gradients before it, so that the norms of each
        rank are computed then."""
        for source in self._sources:
            if isinstance(source, SyncedBuffer):
                source.memory.local_squares = {} if is_due else None

    def begin(self, ready: Sequence[Ready], inverse: float | Tensor, *, updates: bool, spectrum: bool = False) -> None:
        """Add up gradients and main weights, before the update. `inverse` is 1 / loss scale; with `updates`, an update
        follows; with `spectrum`, singular values are computed of the matrices of matrix rules, in float32."""
        self._entries = []
        self._before = []
        self._inverse = inverse
        updated: set[int] = set()
        for unit_grads in ready:
            for piece, grad in zip(unit_grads.pieces, unit_grads.grads, strict=True):
                if piece.counted and grad.numel():
                    found = backends.grad_stats([grad])
                    self._add(piece.id, GRAD, found.sum_of_squares * piece.source.grad_scale**2)
                    self._add(piece.id, ZEROS, found.zeros)
                    self._add(piece.id, GRAD_NUMEL, grad.numel())
                    updated.add(id(piece))
        for piece in self._pieces:
            if piece.main.shape.numel():
                value = _weights(piece)
                self._add(piece.id, WEIGHT, _square(value))
                self._add(piece.id, WEIGHT_SUM, _sum(value))
                if updates and id(piece) in updated:
                    self._before.append((piece, value.detach().clone()))
        if spectrum:
            self._add_spreads()
        if self._pieces:
            self._entries += [(-2, self._pieces[0].count.next()), (-1, 1.0)]
        if len(self.replicas_of) > 1:
            squares = list(self._local_squares())
            self._entries += [(self._rank_at, square) for square in squares]
            if squares:
                self._entries.append((self._rank_at + 1, 1.0))

    def num_updates(self) -> int:
        """Return the number of updates that were made to this rank's parameters, for which the host waits."""
        return max((piece.step for piece in self._pieces[:1]), default=0)

    def _add(self, id: ParamId, column: int, value: Tensor | float) -> None:
        self._entries.append((NUM_COLUMNS * self._row_of[id] + column, value))

    def _local_squares(self) -> Iterator[Tensor]:
        """Yield sums of squares of this rank's gradients before the reduction, where they are known."""
        for source in self._sources:
            if isinstance(source, SyncedBuffer):
                yield from (source.memory.local_squares or {}).values()
            elif isinstance(source, BufferedGrads):
                grads = [param.grad for param in source.params.values() if param.grad is not None]
                if dense := [grad for grad in grads if not is_sparse(grad)]:
                    yield backends.grad_stats(dense, count_zeros=False).sum_of_squares

    def finish(self, outcome: Outcome, *, max_norm: float) -> "Recorded":
        """Add up the updates, and sum over ranks. `outcome` is the step's. Raises CollectiveError if a peer is lost."""
        for piece, before in self._before:
            exact = before if before.dtype in (torch.float32, torch.float64) else before.float()
            change = exact.sub_(_weights(piece).to(exact))
            self._add(piece.id, UPDATE, _square(change))
            self._add(piece.id, UPDATE_SUM, -_sum(change))
        num_sums = NUM_COLUMNS * len(self.names)  # of parameters; those of ranks and of updates follow
        size = num_sums + 2 * len(self.replicas_of) + 2
        device = self._device
        on_device = [(at, value) for at, value in self._entries if isinstance(value, Tensor)]
        on_host = [(at, value) for at, value in self._entries if not isinstance(value, Tensor)]
        known = [value for _, value in on_host]
        numbers = torch.tensor(known, dtype=torch.float64, device="cpu")
        added = self._queues.upload(numbers)
        if on_device:
            measured = [value.to(device, torch.float64) for _, value in on_device]
            added = torch.cat([torch.stack(measured), added])
        entries = on_device + on_host
        places = [at % size for at, _ in entries]
        places_on_host = torch.tensor(places, dtype=torch.int64, device="cpu")
        index = self._queues.upload(places_on_host)
        sums = torch.zeros(size, dtype=torch.float64, device=device)
        sums.index_add_(0, index, added)
        with naming("sum of recorded statistics"):
            self._everyone.all_reduce_(sums)
            if self._has_ranks_elsewhere:
                squares = sums[num_sums:-2].clone()
                self._instances.all_reduce_(squares)
                sums[num_sums:-2] = squares
        inverse = torch.as_tensor(self._inverse, dtype=torch.float64, device=device).view(1)
        self._entries = []
        self._before = []
        copy = devices.HostCopy(torch.cat([sums, inverse]), self._queues)
        return Recorded(self, outcome, copy, max_norm)

    def _add_spreads(self) -> None:
        matrix_units = (unit for unit in self._units if unit.rule.needs is Needs.MATRICES)
        for piece in (piece for unit in matrix_units for piece in unit.pieces):
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
                spread = torch.where(matrix.isfinite().all(), values[0] / values[-1], math.nan)
                self._add(piece.id, SPREAD, spread)


class Recorded:
    """The sums of one step, which the host reads once."""

    def __init__(self, sums: TensorSums, outcome: Outcome, copy: devices.HostCopy, max_norm: float):
        self.outcome = outcome
        self._sums = sums
        self._copy = copy
        self._max_norm = max_norm

    def arrives(self, within: float) -> bool:
        """Wait at most `within` seconds for the sums. Return whether the host has them."""
        return self._copy.arrives(within)

    def read(self) -> StepStats:
        """Return the numbers, for which the host waits."""
        *numbers, next_updates, num_counts, inverse = self._copy.wait().tolist()
        sums = self._sums
        report = self.outcome.resolve()
        success = report.success
        num_sums = NUM_COLUMNS * len(sums.names)
        rows = [numbers[start : start + NUM_COLUMNS] for start in range(0, num_sums, NUM_COLUMNS)]
        numels = list(sums.numels.values())

        def tensor_stats(places: Sequence[int]) -> TensorStats:
            columns = zip(*(rows[at] for at in places), strict=True)
            grad, zeros, grad_numel, weight, update, spread, weight_sum, update_sum = map(sum, columns)
            grad_norm = math.sqrt(grad) * inverse if grad_numel else None
            update_norm = math.sqrt(update) if success else None
            share_of_zeros = zeros / grad_numel if grad_numel else None
            numel = sum(numels[at] for at in places)
            return TensorStats(
                grad_norm=grad_norm,
                weight_norm=math.sqrt(weight),
                update_norm=update_norm,
                zeros=share_of_zeros,
                numel=numel,
                spread=spread if spread and len(places) == 1 else None,
                weight_sum=weight_sum,
                update_sum=update_sum if success else None,
            )

        by_group: dict[str, list[int]] = {}
        for at, group in enumerate(sums.group_of.values()):
            by_group.setdefault(group, []).append(at)
        groups = {group: tensor_stats(places) for group, places in by_group.items()}
        params = {name: tensor_stats([at]) for at, name in enumerate(sums.names)}
        rank_norms = {}
        rank_sums = iter(numbers[num_sums:])
        for rank, square, is_measured in zip(sums.replicas_of, rank_sums, rank_sums, strict=False):
            rank_norms[rank] = math.sqrt(square) * inverse if is_measured else None
        grad_norm = report.norms[0]
        clip = 1.0
        if math.isfinite(grad_norm) and self._max_norm > 0:
            clip = min(self._max_norm / (grad_norm + 1e-6), 1.0)  # `clip_coefficients`, without the device
        updates = round(next_updates / num_counts) - 1 if num_counts else 0
        loss_scale = 1.0 / inverse
        step = self.outcome.step
        reason = reason_of(report)
        replicas_of = sums.replicas_of
        loss = report.loss
        return StepStats(
            step=step,
            updates=updates,
            success=success,
            reason=reason,
            grad_norm=grad_norm,
            clip=clip,
            loss_scale=loss_scale,
            params=params,
            groups=groups,
            rank_norms=rank_norms,
            replicas_of=replicas_of,
            loss=loss,
        )


def _weights(piece: OwnedPiece) -> Tensor:
    """Return the main weights, or the parameter on the device if its main weights are on the host."""
    return piece.main.target if isinstance(piece.main, HostMain) else piece.main.value()


def _square(value: Tensor) -> Tensor:
    return backends.grad_stats([value.detach()], count_zeros=False).sum_of_squares


def _sum(value: Tensor) -> Tensor:
    return value.detach().sum(dtype=torch.float64)
