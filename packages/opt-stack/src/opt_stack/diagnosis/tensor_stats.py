"""`TensorSums`: norms of the gradient, weight and update of every parameter, in the steps that record them.

A recorded step reads gradients, main weights and updates once more, and keeps a copy of the main weights that this rank
counts until they are updated. Every rank adds up the elements that it counts; one all-reduce of one float64 tensor, six
numbers a parameter and two a rank, gives all of them the numbers of the whole model. Other steps do nothing here. The
host reads the sums later, from a copy.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from opt_distributed.buffers import SyncedBuffer, naming
from opt_distributed.comm import Roles
from opt_distributed.comm import device as devices
from opt_distributed.pieces import BufferedGrads, HostMain, OwnedPiece, Ready, is_sparse
from opt_distributed.step import Family, Outcome, Unit
from opt_kernels import backends
from opt_kernels.rules import Needs
from opt_paramgroups import ParamId

GRAD, ZEROS, GRAD_NUMEL, WEIGHT, UPDATE, SPREAD = range(6)  # the columns of a parameter's sums


class TensorStats(NamedTuple):
    """The numbers of one parameter, or of all parameters of a group, over all ranks. Norms are L2 norms."""

    grad_norm: float | None  # of the mean gradient, without loss scale, before clipping; None without a gradient
    weight_norm: float  # of the main weights before the update
    update_norm: float | None  # of the change of the main weights; None in a step that was skipped
    zeros: float | None  # share of the gradient's elements that are 0
    numel: int
    spread: float | None = None  # largest / smallest singular value of the weight, if it was asked for

    @property
    def ratio(self) -> float | None:
        """`update_norm / weight_norm`; None if there was no update, or the weight was zero."""
        return self.update_norm / self.weight_norm if self.update_norm is not None and self.weight_norm else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """The numbers of one step, equal on every rank."""

    step: int  # counted since the optimizer was built, from 1
    updates: int  # made to the parameters before, also by earlier runs that were loaded
    success: bool
    reason: str  # "", "overflow", or "norm above the limit"
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

    def __str__(self) -> str:
        rows = [("", "gradient", "weight", "update", "update/weight", "zeros")]
        for name, of in {**self.groups, **self.params}.items():
            numbers = (of.grad_norm, of.weight_norm, of.update_norm, of.ratio, of.zeros)
            rows.append((name, *("-" if number is None else f"{number:.3g}" for number in numbers)))  # type: ignore[arg-type]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        outcome = "applied" if self.success else f"skipped: {self.reason}"
        head = f"step {self.step} ({outcome}): norm {self.grad_norm:.4g}, clip factor {self.clip:.3g}"
        return "\n".join([f"{head}, loss scale {self.loss_scale:g}", *lines])


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
        """Collective."""
        self._units = units
        self._sources = [source for family in families for source in family.sources]
        self._everyone = everyone = roles.totals
        self._instances = instances = roles.dense.inter
        self._device = device
        self._queues = devices.device_of(device)
        rank = roles.everyone.rank
        first_of: dict[ParamId, int] = {}
        replicas = rank
        for family in reversed(families):  # dense parameters last
            axes = family.axes
            replicas = min(axes.inter.gather_objects(min(axes.dp.gather_objects(rank))))
            first = min(axes.tp.gather_objects(replicas))
            first_of |= {id: first for source in family.sources for id in source.params}
        place = {id: at for at, id in enumerate(order)}
        self._pieces = sorted(
            (piece for unit in units for piece in unit.pieces if piece.counted), key=lambda p: place[p.id]
        )
        meshes = {piece.id: getattr(piece.param, "device_mesh", None) for piece in self._pieces}
        first_of |= {id: min(first_of[id], int(mesh.mesh.min())) for id, mesh in meshes.items() if mesh is not None}
        row_of = {id: Row(str(id), first_of[id]) for id in meshes}
        local = [(row_of[piece.id], group_names[piece.group], piece.main.shape.numel()) for piece in self._pieces]
        self.numels: dict[Row, int] = {}
        self.group_of: dict[Row, str] = {}
        for row, group, numel in (entry for of_rank in everyone.gather_objects(local) for entry in of_rank):
            self.numels[row] = self.numels.get(row, 0) + numel
            self.group_of[row] = group
        index_of = {row: at for at, row in enumerate(self.numels)}
        self._row_of = {id: index_of[row] for id, row in row_of.items()}
        names = [row.name for row in self.numels]
        self.names = [r.name if names.count(r.name) == 1 else f"{r.name} (rank {r.place})" for r in self.numels]
        here = everyone.gather_objects((rank, replicas))
        per_instance = instances.gather_objects(here)
        # By rank: the first of the ranks that hold the same dense parameters.
        self.replicas_of: dict[int, int] = dict(entry for of_instance in per_instance for entry in of_instance)
        self._has_ranks_elsewhere = len(self.replicas_of) > len(here)  # in other instances
        self._rank_at = 6 * len(names) + 2 * list(self.replicas_of).index(rank)
        # Of a step that has begun: an index, and what is added there; a number if the host knows it.
        self._entries: list[tuple[int, Tensor | float]] = []
        self._before: list[tuple[OwnedPiece, Tensor]] = []  # its main weights
        self._inverse: float | Tensor = 1.0

    def expect(self, is_due: bool) -> None:
        """Say whether the next step is recorded: wrapped models reduce gradients before it, so that the norms of each
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
                    at = 6 * self._row_of[piece.id]
                    self._entries += [(at + GRAD, found.sum_of_squares * piece.source.grad_scale**2)]
                    self._entries += [(at + ZEROS, found.zeros), (at + GRAD_NUMEL, grad.numel())]
                    updated.add(id(piece))
        for piece in self._pieces:
            if piece.main.shape.numel():
                value = _weights(piece)
                self._entries.append((6 * self._row_of[piece.id] + WEIGHT, _square(value)))
                if updates and id(piece) in updated:
                    self._before.append((piece, value.detach().clone()))
        if spectrum:
            self._entries += self._spreads()
        if self._pieces:
            self._entries += [(-2, self._pieces[0].count.next()), (-1, 1.0)]
        if len(self.replicas_of) > 1:
            squares: list[Tensor] = []  # of this rank's gradients before the reduction, where they are known
            for source in self._sources:
                if isinstance(source, SyncedBuffer):
                    squares += (source.memory.local_squares or {}).values()
                elif isinstance(source, BufferedGrads):
                    grads = [p.grad for p in source.params.values() if p.grad is not None and not is_sparse(p.grad)]
                    squares += [backends.grad_stats(grads, count_zeros=False).sum_of_squares] if grads else []
            self._entries += [(self._rank_at, square) for square in squares]
            self._entries += [(self._rank_at + 1, 1.0)] if squares else []

    def finish(self, outcome: Outcome, *, max_norm: float) -> "Recorded":
        """Add up the updates, and sum over ranks. `outcome` is the step's. Raises CollectiveError if a peer is lost."""
        for piece, before in self._before:
            exact = before if before.dtype in (torch.float32, torch.float64) else before.float()
            change = exact.sub_(_weights(piece).to(exact))
            self._entries.append((6 * self._row_of[piece.id] + UPDATE, _square(change)))
        size = 6 * len(self.names) + 2 * len(self.replicas_of) + 2
        device = self._device
        entries = sorted(self._entries, key=lambda entry: not isinstance(entry[1], Tensor))  # stable: numbers come last
        values = [value.to(device, torch.float64) for _, value in entries if isinstance(value, Tensor)]
        numbers = [value for _, value in entries[len(values) :]]
        known = self._queues.upload(torch.tensor(numbers, dtype=torch.float64, device="cpu"))
        sums = torch.zeros(size, dtype=torch.float64, device=device)
        places = torch.tensor([at % size for at, _ in entries], dtype=torch.int64, device="cpu")
        index = self._queues.upload(places)
        sums.index_add_(0, index, torch.cat([torch.stack(values), known]) if values else known)
        with naming("sum of recorded statistics"):
            self._everyone.all_reduce_(sums)
            if self._has_ranks_elsewhere:
                of_ranks = sums[6 * len(self.names) : -2].clone()
                self._instances.all_reduce_(of_ranks)
                sums[6 * len(self.names) : -2] = of_ranks
        inverse = torch.as_tensor(self._inverse, dtype=torch.float64, device=device).view(1)
        self._entries = []
        self._before = []
        return Recorded(self, outcome, devices.HostCopy(torch.cat([sums, inverse]), self._queues), max_norm)

    def _spreads(self) -> Iterator[tuple[int, Tensor]]:
        for unit in self._units:
            for piece in unit.pieces if unit.rule.needs is Needs.MATRICES else ():
                value = piece.main.value()
                is_counted = piece.counted
                if piece.stage is not None:
                    wholes = piece.stage.gather({piece.id: value})
                    value = wholes.get(piece.id, value)
                    is_counted = piece.stage.counts(piece.id)
                if is_counted and piece.id in self._row_of and (piece.stage or not piece.matrix.tensor_parallel):
                    matrix = value.detach().float().reshape(-1, value.shape[-1])
                    # The decomposition raises for values that are not finite, on the ranks that have them.
                    values = torch.linalg.svdvals(matrix.nan_to_num(0.0, 0.0, 0.0))
                    spread = torch.where(matrix.isfinite().all(), values[0] / values[-1], math.nan)
                    yield 6 * self._row_of[piece.id] + SPREAD, spread


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
        rows = [numbers[6 * at : 6 * at + 6] for at in range(len(sums.names))]
        numels = list(sums.numels.values())
        by_group: dict[str, list[int]] = {}
        for at, group in enumerate(sums.group_of.values()):
            by_group.setdefault(group, []).append(at)

        def tensor_stats(places: Sequence[int]) -> TensorStats:
            grad, zeros, grad_numel, weight, update, spread = (sum(c) for c in zip(*(rows[at] for at in places)))
            return TensorStats(
                grad_norm=math.sqrt(grad) * inverse if grad_numel else None,
                weight_norm=math.sqrt(weight),
                update_norm=math.sqrt(update) if report.success else None,
                zeros=zeros / grad_numel if grad_numel else None,
                numel=sum(numels[at] for at in places),
                spread=spread if spread and len(places) == 1 else None,
            )

        of_ranks = iter(numbers[6 * len(rows) :])
        norm = report.norms[0]
        clip = 1.0
        if math.isfinite(norm) and self._max_norm > 0:
            clip = min(self._max_norm / (norm + 1e-6), 1.0)  # `clip_coefficients`, without the device
        return StepStats(
            step=self.outcome.step,
            updates=round(next_updates / num_counts) - 1 if num_counts else 0,
            success=report.success,
            reason="overflow" if report.overflow else "norm above the limit" if report.is_above_limit else "",
            grad_norm=norm,
            clip=clip,
            loss_scale=1.0 / inverse,
            params={name: tensor_stats([at]) for at, name in enumerate(sums.names)},
            groups={group: tensor_stats(places) for group, places in by_group.items()},
            rank_norms={
                rank: math.sqrt(square) * inverse if is_measured else None
                for rank, square, is_measured in zip(sums.replicas_of, of_ranks, of_ranks, strict=False)
            },
            replicas_of=sums.replicas_of,
        )


def _weights(piece: OwnedPiece) -> Tensor:
    """The main weights, or the parameter on the device if its main weights are on the host."""
    return piece.main.target if isinstance(piece.main, HostMain) else piece.main.value()


def _square(value: Tensor) -> Tensor:
    return backends.grad_stats([value.detach()], count_zeros=False).sum_of_squares
