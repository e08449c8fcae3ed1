"""Hooks that read norms of parameters, or means of rows, that are cut over ranks: their sums are reduced once a step.

gradients of all hooked units ─▶ sums of rows that span ranks ─▶ one all-reduce for each group of ranks ─▶ means of rows
directions of all hooked units ─▶ sums over local elements ─▶ one all-reduce for each group of ranks, however many
parameters are cut over it ─▶ weights of all units are updated
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from opt_distributed.buffers.wires import CollectiveError
from opt_distributed.comm.collectives import Comm, group_of, sum_together_
from opt_distributed.comm.device import Device
from opt_distributed.pieces.exchange import ComputeStage, update_
from opt_kernels.hooks import NUM_SUMS, Begun, HookedUpdate, RowMeans, SpannedRows, add_row_sums_
from opt_kernels.works import Batch
from opt_paramgroups import ParamId


class CutRows(NamedTuple):
    """Parameters of a unit whose rows span the same ranks, which all hold the same ids in this order."""

    rows: Mapping[ParamId, SpannedRows]
    comms: tuple[Comm, ...]  # one for each axis that rows span

    def parted(self, sums: Tensor) -> dict[ParamId, Tensor]:
        """Split `sums` into views, one for each parameter."""
        return dict(zip(self.rows, torch.split(sums, [rows.num for rows in self.rows.values()]), strict=True))


class Piece(Protocol):
    """A contiguous range of a parameter's flat local elements."""

    id: ParamId
    of_param: slice


class LocalRows(NamedTuple):
    """The local parts of one unit's rows that span ranks."""

    cut: Sequence[CutRows]
    pieces: Sequence[Piece]
    grads: Sequence[Tensor]  # of the pieces, before they are scaled


def means_over_ranks(local: Iterable[LocalRows], *, device: torch.device) -> dict[ParamId, Tensor]:
    """Return the float64 row means (num,) of every parameter whose rows span ranks. Collective.

    Raises CollectiveError if a peer is lost.
    """
    sums: dict[int, tuple[CutRows, Tensor]] = {}  # by identity: units that share parameters share the `CutRows`
    for unit in local:
        for cut in unit.cut:
            num = sum(rows.num for rows in cut.rows.values())
            if id(cut) not in sums:
                sums[id(cut)] = cut, torch.zeros(num, dtype=torch.float64, device=device)
            _add_sums_(cut, sums[id(cut)][1], unit)
    sum_over_ranks_([(vector, cut.comms) for cut, vector in sums.values()], what="row sums")
    return {
        name: part / cut.rows[name].whole_numel
        for cut, vector in sums.values()
        for name, part in cut.parted(vector).items()
    }


def _add_sums_(cut: CutRows, vector: Tensor, unit: LocalRows) -> None:
    parts = cut.parted(vector)
    for piece, grad in zip(unit.pieces, unit.grads, strict=True):
        if piece.id in parts:
            add_row_sums_(parts[piece.id], grad, cut.rows[piece.id], first=piece.of_param.start)


def means_to_host(means: Mapping[ParamId, Tensor], pieces: Sequence[Piece], device: Device) -> dict[ParamId, Tensor]:
    """Copy the means of the pieces' parameters to host memory, as one tensor."""
    needed = {piece.id: means[piece.id] for piece in pieces if piece.id in means}
    if not needed:
        return {}
    joined = device.to_host(torch.cat(list(needed.values())))
    sizes = [one.numel() for one in needed.values()]
    return dict(zip(needed, torch.split(joined, sizes), strict=True))


def means_of_pieces(
    cut: Sequence[CutRows], pieces: Sequence[Piece], means: Mapping[ParamId, Tensor]
) -> list[RowMeans | None]:
    """The row means of each piece; None if its rows are whole on this rank."""
    rows = {name: found for one in cut for name, found in one.rows.items()}
    return [
        RowMeans(means[piece.id], rows[piece.id], piece.of_param.start) if piece.id in rows else None
        for piece in pieces
    ]


def sum_over_ranks_(vectors: Iterable[tuple[Tensor, Sequence[Comm]]], *, what: str) -> None:
    """Sum each vector over its groups of ranks: one all-reduce for each group.

    Raises CollectiveError if a peer is lost.
    """
    by_comm: dict[int, tuple[Comm, list[Tensor]]] = {}
    for vector, comms in vectors:
        for comm in comms:
            by_comm.setdefault(id(group_of(comm) or comm), (comm, []))[1].append(vector)
    for comm, joined in by_comm.values():
        try:
            sum_together_(joined, comm)
        except Exception as error:  # whatever a backend raises when a peer is gone
            raise CollectiveError(f"sum of the hooks' {what}: {error}") from error


class CutParams(NamedTuple):
    """Parameters of a unit that are cut over the same ranks, which all hold the same ids in this order."""

    ids: tuple[ParamId, ...]
    comms: tuple[Comm, ...]  # one for each axis that the parameters are cut over


class Call(NamedTuple):
    """Works with one gradient scale, whose directions are computed."""

    begun: Begun
    sums: Tensor  # (works, NUM_SUMS) float64; over whole parameters after `add_over_ranks_`
    ids: Sequence[ParamId]  # of the works


class HookedStep(NamedTuple):
    """The step of a hooked unit, after its directions and before its weights are updated."""

    rule: HookedUpdate
    calls: Sequence[Call]
    cut: Sequence[CutParams]
    on_host_of: Device | None = None  # the device of a unit whose sums are in host memory; None: on the device

    def finish_(self, *, skip: Tensor | None = None) -> None:
        """Update the weights."""
        for call in self.calls:
            self.rule.finish_(call.begun, call.sums, skip=skip)


class ScaledBatches(NamedTuple):
    """Works whose gradients have the same scale."""

    scale: float | Tensor
    batches: Sequence[Batch]
    ids: Sequence[ParamId]  # of the works
    row_means: Sequence[RowMeans | None] = ()  # of the works whose rows span ranks; (): no rows do


def begin_(
    rule: HookedUpdate,
    scaled: Sequence[ScaledBatches],
    *,
    stages: Sequence[ComputeStage],
    cut: Sequence[CutParams],
    skip: Tensor | None = None,
    on_host_of: Device | None = None,
) -> HookedStep:
    """Run the bare rule to get the directions. Writes its states, unless `skip` is set."""
    calls = []
    for of in scaled:
        begun = rule.begin(of.batches, grad_scale=of.scale, row_means=of.row_means)
        update_(rule.rule, begun.directions, grad_scale=begun.grad_scale, stages=stages, skip=skip)
        calls.append(Call(begun, rule.sums(begun), of.ids))
    return HookedStep(rule, calls, cut, on_host_of)


def add_over_ranks_(steps: Iterable[HookedStep | None], *, device: torch.device) -> None:
    """Reduce the sums of cut parameters over all ranks that hold parts. Collective: every rank passes its units.

    Raises CollectiveError if a peer is lost.
    """
    summed = [step for step in steps if step is not None and step.rule.sums_norms]
    of_cut: dict[int, Tensor] = {}  # by identity: units with the same cut parameters share the `CutParams`
    vectors: list[tuple[Tensor, Sequence[Comm]]] = []
    for step in summed:
        for cut in step.cut:
            vector = _gathered(step, cut, device)
            if id(cut) in of_cut:
                of_cut[id(cut)].add_(vector)
                continue
            of_cut[id(cut)] = vector
            vectors.append((vector, cut.comms))
    sum_over_ranks_(vectors, what="norms")
    for step in summed:
        for cut in step.cut:
            _deal_out_(step, cut, of_cut[id(cut)], device)


def _gathered(step: HookedStep, cut: CutParams, device: torch.device) -> Tensor:
    """(len(cut.ids), NUM_SUMS) on `device`: the local sums of each parameter, over all calls of the step."""
    with _computing(step):
        vector = torch.zeros(len(cut.ids), NUM_SUMS, dtype=torch.float64, device=_place(step, device))
        for call in step.calls:
            here, there = _rows(step, call, cut, vector.device)
            vector.index_add_(0, there, call.sums.index_select(0, here))
    return vector if step.on_host_of is None else step.on_host_of.upload(vector)


def _deal_out_(step: HookedStep, cut: CutParams, vector: Tensor, device: torch.device) -> None:
    """Write the reduced sums to the calls of the step."""
    if step.on_host_of is not None:
        vector = step.on_host_of.to_host(vector)
    with _computing(step):
        for call in step.calls:
            here, there = _rows(step, call, cut, _place(step, device))
            call.sums.index_copy_(0, here, vector.index_select(0, there))


def _computing(step: HookedStep) -> AbstractContextManager[None]:
    return nullcontext() if step.on_host_of is None else step.on_host_of.on_host()


def _place(step: HookedStep, device: torch.device) -> torch.device:
    return device if step.on_host_of is None else torch.device("cpu")


def _rows(step: HookedStep, call: Call, cut: CutParams, device: torch.device) -> tuple[Tensor, Tensor]:
    find = _rows_among if step.on_host_of is not None else _rows_on_device
    return find(tuple(call.ids), cut.ids, device)


def _rows_among(ids: tuple[ParamId, ...], cut: tuple[ParamId, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Match `ids` with `cut`: the indices in `ids` of those in both, and their indices in `cut`."""
    places = {id: place for place, id in enumerate(cut)}
    here = [row for row, id in enumerate(ids) if id in places]
    there = [places[ids[row]] for row in here]
    return torch.tensor(here, dtype=torch.int64, device=device), torch.tensor(there, dtype=torch.int64, device=device)


# Cached, because these are the same at every step, and the host would wait for each copy to the device.
_rows_on_device = lru_cache(maxsize=256)(_rows_among)
