"""Assigns boxes to ranks for writing: every box once, to a rank that holds it, with balanced load."""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from opt_checkpoint.boxes.box import split_rows
from opt_checkpoint.boxes.overlaps import equal_rows
from opt_checkpoint.dcp.held_tensors import HeldTensors
from opt_checkpoint.disk.columns import Array

_PIECES_PER_RANK = 12  # the largest movable piece is a twelfth of a rank's share: at most 9 % above the mean
_SMALLEST_PIECE_BYTES = 64 << 10


class Parts(NamedTuple):
    """Boxes to be written, in the order of the ranks that write them.

    Args:
        rank: (p,) the rank that writes the part.
        box: (p,) the held box of that rank that contains it.
        offsets: (p, axes) its offsets in the tensor.
        sizes: (p, axes) its sizes.
    """

    rank: Array
    box: Array
    offsets: Array
    sizes: Array


class _Groups(NamedTuple):
    """The held boxes, grouped by equality.

    Args:
        members: (m,) indices of held boxes, by group, then by rank; one for each rank that holds the box.
        start: (g,) start of each group in `members`.
        holders: (g,) number of ranks that hold the box of each group.
        main: (g,) the box of the main replica.
    """

    members: Array
    start: Array
    holders: Array
    main: Array


def assign_parts(held: HeldTensors) -> Parts:
    """Assign every box of a main replica to the least loaded rank that holds the same box.

    A box that only one rank holds is written by that rank. The other boxes are assigned in Megatron-Core's greedy
    order: fewest holders first, then largest. Boxes larger than a rank's fair share are first cut into rows.

    Args:
        held: the validated contents of all ranks.
    """
    groups = _grouped(held)
    nbytes = np.prod(held.sizes[groups.main], axis=1) * held.itemsize[held.owner[groups.main]]
    single = groups.holders == 1
    alone = groups.members[groups.start[single]]
    load = np.bincount(held.rank[held.owner[alone]], weights=nbytes[single], minlength=held.ranks)
    share = int(nbytes.sum()) / held.ranks
    largest = max(_SMALLEST_PIECE_BYTES, int(share / _PIECES_PER_RANK))
    pieces = _pieces(held, groups, np.flatnonzero(~single), nbytes, largest)
    ranks = _deal(held, groups, pieces, [int(n) for n in load])
    parts = Parts(
        rank=np.concatenate([held.rank[held.owner[alone]], ranks]),
        box=np.concatenate([alone, _box_of_rank(held, groups, pieces.group, ranks)]),
        offsets=np.concatenate([held.offsets[alone], pieces.offsets]),
        sizes=np.concatenate([held.sizes[alone], pieces.sizes]),
    )
    order = np.argsort(parts.rank, kind="stable")
    return Parts(*(column[order] for column in parts))


def _grouped(held: HeldTensors) -> _Groups:
    """Group equal boxes of one tensor, for groups that contain a main replica."""
    at = np.flatnonzero(held.usable)
    owner = held.owner[at]
    columns = [held.key[owner], *held.offsets[at].T, *held.sizes[at].T]
    order, group = equal_rows(columns)
    main = np.full(int(group.max(initial=-1)) + 1, -1)
    is_main = held.main[owner[order]]
    main[group[is_main][::-1]] = at[order][is_main][::-1]
    rank = held.rank[owner[order]]
    # A rank may hold a box twice, as a shared parameter; of these the first counts.
    wanted = (np.diff(group, prepend=-1) > 0) | (np.diff(rank, prepend=-1) != 0)
    wanted &= main[group] >= 0
    members, group = at[order][wanted], group[wanted]
    kept, start, count = np.unique(group, return_index=True, return_counts=True)
    in_order = np.argsort(members[start], kind="stable")  # as the ranks hold them
    return _Groups(members, start[in_order], count[in_order], main[kept][in_order])


class _Pieces(NamedTuple):
    """Boxes that several ranks hold, or rows of such boxes, in the order of assignment."""

    group: Array
    nbytes: Array
    offsets: Array
    sizes: Array


def _pieces(held: HeldTensors, groups: _Groups, movable: Array, nbytes: Array, largest: int) -> _Pieces:
    count = -(-nbytes[movable] // largest)
    whole, cut = movable[count <= 1], movable[count > 1]
    group, offsets, sizes = [whole], [held.offsets[groups.main[whole]]], [held.sizes[groups.main[whole]]]
    for number, parts in zip(cut.tolist(), count[count > 1].tolist()):
        boxes = list(split_rows(held.box(groups.main[number]), parts))
        rows = np.array(boxes, np.int64).reshape(len(boxes), 2, -1)
        missing = held.offsets.shape[1] - rows.shape[2]
        group.append(np.full(len(boxes), number))
        offsets.append(np.pad(rows[:, 0], ((0, 0), (0, missing))))
        sizes.append(np.pad(rows[:, 1], ((0, 0), (0, missing)), constant_values=1))
    pieces = _Pieces(np.concatenate(group), np.zeros(0), np.concatenate(offsets), np.concatenate(sizes))
    itemsize = held.itemsize[held.owner[groups.main[pieces.group]]]
    pieces = pieces._replace(nbytes=np.prod(pieces.sizes, axis=1) * itemsize)
    order = np.lexsort((-pieces.nbytes, groups.holders[pieces.group]))
    return _Pieces(*(column[order] for column in pieces))


def _deal(held: HeldTensors, groups: _Groups, pieces: _Pieces, load: list[int]) -> Array:
    """Assign each piece to its least loaded holder, with one heap per set of holders. Writes to `load`."""
    heaps: dict[bytes, list[tuple[int, int]]] = {}
    heap_of_group: dict[int, list[tuple[int, int]]] = {}
    chosen = np.zeros(len(pieces.group), np.int64)
    for number, (group, nbytes) in enumerate(zip(pieces.group.tolist(), pieces.nbytes.tolist())):
        heap = heap_of_group.get(group)
        if heap is None:
            start = groups.start[group]
            holders = held.rank[held.owner[groups.members[start : start + groups.holders[group]]]]
            heap = heaps.get(holders.tobytes())
            if heap is None:
                heap = heaps[holders.tobytes()] = sorted((load[r], r) for r in holders.tolist())
            heap_of_group[group] = heap
        seen, rank = heap[0]
        while seen != load[rank]:  # another set of holders has loaded this rank since
            heapq.heapreplace(heap, (load[rank], rank))
            seen, rank = heap[0]
        load[rank] += nbytes
        heapq.heapreplace(heap, (load[rank], rank))
        chosen[number] = rank
    return chosen


def _box_of_rank(held: HeldTensors, groups: _Groups, group: Array, rank: Array) -> Array:
    """The box of a group that a rank holds."""
    by_place, place = np.argsort(groups.start), np.zeros(len(groups.start), np.int64)
    place[by_place] = np.arange(len(groups.start))
    number = np.repeat(np.arange(len(groups.start)), groups.holders[by_place])
    code = number * held.ranks + held.rank[held.owner[groups.members]]  # ascends
    box: Array = groups.members[np.searchsorted(code, place[group] * held.ranks + rank)]
    return box
