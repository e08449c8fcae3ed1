"""Means of gradient rows that span ranks, for hooks: row sums of all hooked units are reduced before any rule runs.

gradients of all hooked units ─▶ row sums over local elements ─▶ one all-reduce for each group of ranks that rows
span, however many parameters ─▶ means of whole rows
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


class Held(NamedTuple):
    """The local parts of one unit's rows that span ranks."""

    cut: Sequence[CutRows]
    pieces: Sequence[Piece]
    grads: Sequence[Tensor]  # of the pieces, before they are scaled


def means_over_ranks(held: Iterable[Held], *, device: torch.device) -> dict[ParamId, Tensor]:
    """Return the float64 row means (num,) of every parameter whose rows span ranks. Collective.

    Raises CollectiveError if a peer is lost.
    """
    sums: dict[int, tuple[CutRows, Tensor]] = {}  # by identity: units that share parameters share the `CutRows`
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
