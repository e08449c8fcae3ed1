"""Means of gradient rows that span ranks, for hooks: row sums of every hooked unit are added up before any rule runs.

gradients of every hooked unit ─▶ row sums of the elements here ─▶ one all-reduce for each group of ranks that rows
span, whatever the number of parameters ─▶ the means of whole rows
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from opt_distributed.buffers.wire import CollectiveError
from opt_distributed.comm.collectives import Comm, group_of
from opt_distributed.comm.device import Device
from opt_distributed.comm.joined import sum_together_
from opt_kernels.hooks.rows import RowMeans, SpannedRows, add_row_sums_
from opt_paramgroups import ParamId


class CutRows(NamedTuple):
    """Parameters of a unit whose rows span the same ranks: all of these hold the same ids in this order."""

    rows: Mapping[ParamId, SpannedRows]
    comms: tuple[Comm, ...]  # one for each axis that rows span

    def parted(self, sums: Tensor) -> dict[ParamId, Tensor]:
        """Views of `sums`, of each parameter."""
        return dict(zip(self.rows, torch.split(sums, [rows.num for rows in self.rows.values()]), strict=True))


class Piece(Protocol):
    """A run of a parameter's flat local elements."""

    id: ParamId
    of_param: slice


class Held(NamedTuple):
    """What one unit holds of rows that span ranks."""

    cut: Sequence[CutRows]
    pieces: Sequence[Piece]
    grads: Sequence[Tensor]  # of the pieces, before they are scaled


def means_over_ranks(held: Iterable[Held], *, device: torch.device) -> dict[ParamId, Tensor]:
    """The float64 row means (num,) of every parameter whose rows span ranks. Every rank calls it with its units.

    Raises CollectiveError where a peer is lost.
    """
    sums: dict[int, tuple[CutRows, Tensor]] = {}  # by identity: units that share parameters share these objects
    for unit in held:
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


def _add_sums_(cut: CutRows, vector: Tensor, unit: Held) -> None:
    parts = cut.parted(vector)
    for piece, grad in zip(unit.pieces, unit.grads, strict=True):
        if piece.id in parts:
            add_row_sums_(parts[piece.id], grad, cut.rows[piece.id], first=piece.of_param.start)


def means_to_host(means: Mapping[ParamId, Tensor], pieces: Sequence[Piece], device: Device) -> dict[ParamId, Tensor]:
    """The means of the pieces' parameters in the memory of the host, in one copy."""
    needed = {piece.id: means[piece.id] for piece in pieces if piece.id in means}
    if not needed:
        return {}
    joined = device.to_host(torch.cat(list(needed.values())))
    sizes = [one.numel() for one in needed.values()]
    return dict(zip(needed, torch.split(joined, sizes), strict=True))


def means_of_pieces(
    cut: Sequence[CutRows], pieces: Sequence[Piece], means: Mapping[ParamId, Tensor]
) -> list[RowMeans | None]:
    """The row means of each piece; None where its rows are whole on this rank."""
    rows = {name: found for one in cut for name, found in one.rows.items()}
    return [
        RowMeans(means[piece.id], rows[piece.id], piece.of_param.start) if piece.id in rows else None
        for piece in pieces
    ]


def sum_over_ranks_(vectors: Iterable[tuple[Tensor, Sequence[Comm]]], *, what: str) -> None:
    """Adds up each vector over its groups of ranks: one all-reduce for each group.

    Raises CollectiveError where a peer is lost.
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
