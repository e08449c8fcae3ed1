"""Who writes what: every box once, by one of its holders, so that all ranks write about as much."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from opt_checkpoint.boxes.box import Box, split_rows
from opt_checkpoint.dcp.local_contents import LocalContents
from opt_checkpoint.disk.dtype_names import dtype_from_name

_PIECES_PER_RANK = 12  # the largest movable piece is a twelfth of a rank's share: at most 9 % above the mean
_SMALLEST_PIECE_BYTES = 64 << 10


class Part(NamedTuple):
    """A box of a tensor that one rank is to write."""

    key: str
    box: Box


class _Movable(NamedTuple):
    """A box that several ranks hold."""

    holders: tuple[int, ...]
    nbytes: int
    part: Part


def assign_parts(per_rank: Sequence[LocalContents]) -> list[list[Part]]:
    """Give every box of a main replica to one rank that holds the same box, the least loaded one.

    What only one rank holds it must write. The rest is dealt out after Megatron-Core's greedy order: fewest holders
    first, then largest; boxes larger than a rank's fair share are cut into rows before.

    Args:
        per_rank: the validated contents of each rank, by rank.

    Returns:
        For each rank the parts it writes, in a fixed order.
    """
    parts: list[list[Part]] = [[] for _ in per_rank]
    load, movable = [0] * len(per_rank), []
    for candidate in _candidates(per_rank):
        if len(candidate.holders) == 1:
            parts[candidate.holders[0]].append(candidate.part)
            load[candidate.holders[0]] += candidate.nbytes
        else:
            movable.append(candidate)
    share = (sum(load) + sum(m.nbytes for m in movable)) / len(per_rank)
    pieces = [p for m in movable for p in _cut(m, max(_SMALLEST_PIECE_BYTES, int(share / _PIECES_PER_RANK)))]
    pieces.sort(key=lambda p: (len(p.holders), -p.nbytes, p.part.key, p.part.box.offsets))
    _deal(pieces, load, parts)
    return parts


def _deal(pieces: Sequence[_Movable], load: list[int], parts: list[list[Part]]) -> None:
    """Each piece to its least loaded holder, found by one heap per set of holders."""
    heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for piece in pieces:
        if piece.holders not in heaps:
            heaps[piece.holders] = sorted((load[r], r) for r in piece.holders)
        heap = heaps[piece.holders]
        seen, rank = heap[0]
        while seen != load[rank]:  # another set of holders has loaded this rank since
            heapq.heapreplace(heap, (load[rank], rank))
            seen, rank = heap[0]
        parts[rank].append(piece.part)
        load[rank] += piece.nbytes
        heapq.heapreplace(heap, (load[rank], rank))


def _candidates(per_rank: Sequence[LocalContents]) -> Iterator[_Movable]:
    holders: dict[Part, list[int]] = defaultdict(list)
    mains: dict[Part, str] = {}
    for rank, own in enumerate(per_rank):
        for tensor in own.tensors:
            for box in tensor.boxes:
                part = Part(tensor.key, box)
                holders[part].append(rank)
                if tensor.main:
                    mains[part] = tensor.dtype
    for part, dtype in mains.items():
        ranks = tuple(dict.fromkeys(holders[part]))
        yield _Movable(ranks, part.box.numel * dtype_from_name(dtype).itemsize, part)


def _cut(movable: _Movable, largest: int) -> Iterator[_Movable]:
    count = -(-movable.nbytes // largest)
    each = movable.nbytes // movable.part.box.numel
    for box in split_rows(movable.part.box, count):
        yield _Movable(movable.holders, box.numel * each, Part(movable.part.key, box))
