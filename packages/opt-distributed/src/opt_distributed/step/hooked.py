"""Hooks that read norms of parameters, or means of rows, that are cut over ranks: their sums are reduced once a step.

gradients of all hooked units ─▶ sums of rows that span ranks ─▶ one all-reduce for each group of ranks ─▶ means of rows
directions of all hooked units ─▶ sums over local elements ─▶ one all-reduce for each group of ranks, however many
parameters are cut over it ─▶ weights of all units are updated
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from opt_distributed.buffers.stored import ParamTensors
from opt_distributed.buffers.wires import naming
from opt_distributed.comm.collectives import Comm, group_of, sum_together_
from opt_distributed.comm.device import Device
from opt_distributed.pieces.piece import OwnedPiece, Ready
from opt_kernels.hooks import NUM_SUMS, Begun, HookedUpdate, RowMeans, SpannedRows, add_row_sums_
from opt_paramgroups import ParamId


@dataclass(frozen=True, slots=True, eq=False)
class CutRows:
    """Parameters of a unit whose rows span the same ranks, which all have the same ids in this order."""

    rows: dict[ParamId, SpannedRows]
    comms: tuple[Comm, ...]  # one for each axis that rows span

    def split(self, sums: Tensor) -> dict[ParamId, Tensor]:
        """Split `sums` into views, one for each parameter."""
        sizes = [rows.num for rows in self.rows.values()]
        parts = torch.split(sums, sizes)
        return dict(zip(self.rows, parts, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class CutParams:
    """Parameters of a unit that are cut over the same ranks, which all have the same ids in this order."""

    ids: tuple[ParamId, ...]
    comms: tuple[Comm, ...]  # one for each axis that the parameters are cut over


def means_over_ranks(
    units: Iterable[tuple[Sequence[CutRows], Ready]], *, device: torch.device
) -> dict[ParamId, Tensor]:
    """Return the float64 row means (num,) of every parameter whose rows span ranks, given gradients before they are
    scaled. Collective.

    Raises CollectiveError if a peer is lost.
    """
    sums: dict[CutRows, Tensor] = {}  # units that share parameters share the `CutRows`
    for cuts, (pieces, grads, _) in units:
        for cut in cuts:
            num = sum(rows.num for rows in cut.rows.values())
            zeros = torch.zeros(num, dtype=torch.float64, device=device)
            vector = sums.setdefault(cut, zeros)
            parts = cut.split(vector)
            for piece, grad in zip(pieces, grads, strict=True):
                if piece.id in parts:
                    add_row_sums_(parts[piece.id], grad, cut.rows[piece.id], first=piece.of_param.start)
    _sum_over_ranks_(sums.items(), what="row sums")
    means = {}
    for cut, vector in sums.items():
        for name, part in cut.split(vector).items():
            means[name] = part / cut.rows[name].whole_numel
    return means


def means_to_host(means: ParamTensors, pieces: Sequence[OwnedPiece], device: Device) -> dict[ParamId, Tensor]:
    """Copy the means of the pieces' parameters to host memory, as one tensor."""
    ids = [piece.id for piece in pieces if piece.id in means]
    if not ids:
        return {}
    needed = [means[id] for id in ids]
    joined = device.to_host(torch.cat(needed))
    sizes = [len(mean) for mean in needed]
    return dict(zip(ids, torch.split(joined, sizes), strict=True))


def means_of_pieces(
    cuts: Sequence[CutRows], pieces: Sequence[OwnedPiece], means: ParamTensors
) -> list[RowMeans | None]:
    """The row means of each piece; None if its rows are whole on this rank."""
    rows: dict[ParamId, SpannedRows] = {}
    for cut in cuts:
        rows.update(cut.rows)
    found: list[RowMeans | None] = []
    for piece in pieces:
        of_piece = None
        if piece.id in rows:
            of_piece = RowMeans(means[piece.id], rows[piece.id], piece.of_param.start)
        found.append(of_piece)
    return found


@dataclass(slots=True)
class HookedStep:
    """The step of a hooked unit, after its directions and before its weights are updated."""

    rule: HookedUpdate
    begun: Sequence[Begun]  # for each gradient scale
    ids: tuple[ParamId, ...]  # of the works, of all `begun`
    sums: Tensor  # (works, NUM_SUMS) float64, over whole parameters after `add_over_ranks_`; (0, NUM_SUMS): not needed

    def finish_(self, *, skip: Tensor | None = None) -> None:
        """Update the weights."""
        start = 0
        for begun in self.begun:
            stop = start + sum(len(batch.works) for batch in begun.directions)
            self.rule.finish_(begun, self.sums[start:stop], skip=skip)
            start = stop


def add_over_ranks_(steps: Iterable[tuple[Sequence[CutParams], HookedStep | None]], *, device: torch.device) -> None:
    """Reduce the sums of cut parameters over all ranks that have parts. Collective: every rank passes its units.

    Raises CollectiveError if a peer is lost.
    """
    vectors: dict[CutParams, Tensor] = {}  # units of the same parameters share `CutParams`
    writes = []  # sums of a step, their rows, and those of the vector that are theirs
    for cuts, step in steps:
        if step is None or not step.rule.sums_norms:
            continue
        for cut in cuts:
            zeros = torch.zeros(len(cut.ids), NUM_SUMS, dtype=torch.float64, device=device)
            vector = vectors.setdefault(cut, zeros)
            if step.ids:
                here, there = _rows_among(step.ids, cut.ids, device)
                own = step.sums.index_select(0, here)
                vector.index_add_(0, there, own)
                writes.append((step.sums, here, there, vector))
    _sum_over_ranks_(vectors.items(), what="norms")
    for sums, here, there, vector in writes:
        total = vector.index_select(0, there)
        sums.index_copy_(0, here, total)


def _sum_over_ranks_(vectors: Iterable[tuple[CutRows | CutParams, Tensor]], *, what: str) -> None:
    """Sum each vector over the groups of its cut: one all-reduce for each group."""
    by_group: dict[object, tuple[Comm, list[Tensor]]] = {}
    for cut, vector in vectors:
        for comm in cut.comms:
            _, joined = by_group.setdefault(group_of(comm) or comm, (comm, []))
            joined.append(vector)
    for comm, joined in by_group.values():
        with naming(f"sum of the hooks' {what}"):
            sum_together_(joined, comm)


# Cached, because these are the same at every step, and the host would wait for each copy to the device.
@lru_cache(maxsize=256)
def _rows_among(ids: tuple[ParamId, ...], cut: tuple[ParamId, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Match `ids` with `cut`: the indices in `ids` of those in both, and their indices in `cut`."""
    places = {id: place for place, id in enumerate(cut)}
    here = [row for row, id in enumerate(ids) if id in places]
    there = [places[ids[row]] for row in here]
    rows = torch.tensor([here, there], dtype=torch.int64, device=device)
    return rows[0], rows[1]
