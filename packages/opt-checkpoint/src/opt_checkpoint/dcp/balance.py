"""Assigns boxes to ranks for writing: every box once, to a rank that holds it, with balanced load."""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from opt_checkpoint.boxes.box import split_rows
from opt_checkpoint.boxes.overlaps import equal_rows
from opt_checkpoint.dcp.tensors_of_ranks import TensorsOfRanks
from opt_checkpoint.disk.columns import Array

_PIECES_PER_RANK = 12  # the largest movable piece is a twelfth of a rank's share: at most 9 % above the mean
_SMALLEST_PIECE_BYTES = 64 << 10


class Parts(NamedTuple):
    """Boxes to be written, in the order of the ranks that write them.

    Args:
        rank: (p,) the rank that writes the part.
        box: (p,) the box of that rank that contains it.
        offsets: (p, axes) its offsets in the tensor.
        sizes: (p, axes) its sizes.
    """

    rank: Array
    box: Array
    offsets: Array
    sizes: Array


class _Groups(NamedTuple):
    """The boxes of all ranks, grouped by equality.

    Args:
        members: (m,) indices of boxes, by group, then by rank; one for each rank that holds the box.
        start: (g,) start of each group in `members`.
        holders: (g,) number of ranks that hold the box of each group.
        main: (g,) the box of the main replica.
    """

    members: Array
    start: Array
    holders: Array
    main: Array


def assign_parts(tensors: TensorsOfRanks) -> Parts:
    """Assign every box of a main replica to the least loaded rank that holds the same box.

    A box that only one rank holds is written by that rank. The other boxes are assigned in Megatron-Core's greedy
    order: fewest holders first, then largest. Boxes larger than a rank's fair share are first cut into rows.

    Args:
        tensors: the validated contents of all ranks.
    """
    groups = _grouped(tensors)
    itemsize = tensors.itemsize[tensors.owner[groups.main]]
    nbytes = np.prod(tensors.sizes[groups.main], axis=1) * itemsize
    single = groups.holders == 1
    alone = groups.members[groups.start[single]]
    load = np.bincount(tensors.rank[tensors.owner[alone]], weights=nbytes[single], minlength=tensors.ranks)
    largest = max(_SMALLEST_PIECE_BYTES, int(int(nbytes.sum()) / tensors.ranks / _PIECES_PER_RANK))
    group, offsets, sizes = _pieces(tensors, groups, np.flatnonzero(~single), nbytes, largest)
    nbytes = np.prod(sizes, axis=1) * itemsize[group]
    order = np.lexsort((-nbytes, groups.holders[group]))
    group, offsets, sizes = group[order], offsets[order], sizes[order]
    chosen = _least_loaded(tensors, groups, group, nbytes[order], [int(n) for n in load])
    box = np.concatenate([alone, chosen])
    rank = tensors.rank[tensors.owner[box]]
    order = np.argsort(rank, kind="stable")
    offsets = np.concatenate([tensors.offsets[alone], offsets])
    sizes = np.concatenate([tensors.sizes[alone], sizes])
    return Parts(rank[order], box[order], offsets[order], sizes[order])


def _grouped(tensors: TensorsOfRanks) -> _Groups:
    """Group equal boxes of one tensor, for groups that contain a main replica."""
    at = np.flatnonzero(tensors.usable)
    owner = tensors.owner[at]
    order, group = equal_rows([tensors.key[owner], *tensors.offsets[at].T, *tensors.sizes[at].T])
    main = np.full(int(group.max(initial=-1)) + 1, -1)
    is_main = tensors.main[owner[order]]
    main[group[is_main][::-1]] = at[order][is_main][::-1]
    rank = tensors.rank[owner[order]]
    # A rank may hold a box twice, as a shared parameter; of these the first counts.
    wanted = (np.diff(group, prepend=-1) > 0) | (np.diff(rank, prepend=-1) != 0)
    wanted &= main[group] >= 0
    members, group = at[order][wanted], group[wanted]
    kept, start, count = np.unique(group, return_index=True, return_counts=True)
    in_order = np.argsort(members[start], kind="stable")  # as the ranks hold them
    return _Groups(members, start[in_order], count[in_order], main[kept][in_order])


def _pieces(
    tensors: TensorsOfRanks, groups: _Groups, movable: Array, nbytes: Array, largest: int
) -> tuple[Array, Array, Array]:
    """Boxes that several ranks hold, or rows of such boxes: the group, offsets and sizes of each."""
    count = -(-nbytes[movable] // largest)
    uncut, cut = movable[count <= 1], movable[count > 1]
    group, offsets, sizes = [uncut], [tensors.offsets[groups.main[uncut]]], [tensors.sizes[groups.main[uncut]]]
    for number, parts in zip(cut.tolist(), count[count > 1].tolist()):
        boxes = list(split_rows(tensors.box(groups.main[number]), parts))
        rows = np.array(boxes, np.int64).reshape(len(boxes), 2, -1)
        unused = ((0, 0), (0, tensors.offsets.shape[1] - rows.shape[2]))
        group.append(np.full(len(boxes), number))
        offsets.append(np.pad(rows[:, 0], unused))
        sizes.append(np.pad(rows[:, 1], unused, constant_values=1))
    return np.concatenate(group), np.concatenate(offsets), np.concatenate(sizes)


def _least_loaded(tensors: TensorsOfRanks, groups: _Groups, group: Array, nbytes: Array, load: list[int]) -> Array:
    """The box of the least loaded holder of each piece, with one heap per set of holders. Writes to `load`."""
    heaps: dict[bytes, list[tuple[int, int]]] = {}
    of_group: dict[int, tuple[list[tuple[int, int]], Array, Array]] = {}
    chosen = np.zeros(len(group), np.int64)
    for number, (own, size) in enumerate(zip(group.tolist(), nbytes.tolist())):
        if own not in of_group:
            boxes = groups.members[groups.start[own] :][: groups.holders[own]]
            holders = tensors.rank[tensors.owner[boxes]]
            if (name := holders.tobytes()) not in heaps:
                heaps[name] = sorted((load[r], r) for r in holders.tolist())
            of_group[own] = heaps[name], holders, boxes
        heap, holders, boxes = of_group[own]
        seen, rank = heap[0]
        while seen != load[rank]:  # another set of holders has loaded this rank since
            heapq.heapreplace(heap, (load[rank], rank))
            seen, rank = heap[0]
        load[rank] += size
        heapq.heapreplace(heap, (load[rank], rank))
        chosen[number] = boxes[np.searchsorted(holders, rank)]  # in the order of ranks
    return chosen
