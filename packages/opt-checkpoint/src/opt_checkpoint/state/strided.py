"""Axes that several axes of a mesh cut, one of them in strides: which rows are here. Integers only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Cut(NamedTuple):
    """The cut of a tensor's axis by one axis of a mesh: this rank has part `number` of `size`.

    Args:
        number: of the part.
        size: how many there are.
        split_factor: 1, or into how many runs the axis is first cut; the part is then that of each of these.
    """

    number: int
    size: int
    split_factor: int = 1


def one_run(length: int, cuts: Sequence[Cut]) -> range | None:
    """The rows of an axis that are here, if they are one run however the placements are read; else None.

    Read from left to right, a strided cut takes a part of each of several runs, of which the cuts to its right leave
    one. FSDP2 on tensor-parallel parameters cuts in the other order. If parts are uneven, the two orders can give
    different rows, and the layout in memory is ambiguous.
    """
    as_placed = _rows(length, cuts)
    plain = [cut for cut in cuts if cut.split_factor == 1]
    as_made = _rows(length, [*plain, *(cut._replace(split_factor=1) for cut in cuts if cut.split_factor > 1)])
    if as_placed != as_made:
        return None
    run = range(as_made[0], as_made[-1] + 1) if as_made else range(0)
    return run if len(run) == len(as_made) else None


def _rows(length: int, cuts: Sequence[Cut]) -> list[int]:
    rows = list(range(length))
    for cut in cuts:
        runs = [_part(rows, k, cut.split_factor) for k in range(cut.split_factor)]
        rows = [row for run in runs for row in _part(run, cut.number, cut.size)]
    return rows


def _part(rows: list[int], number: int, size: int) -> list[int]:
    """Like `torch.chunk` cuts."""
    each = -(-len(rows) // size)
    return rows[number * each : (number + 1) * each]
