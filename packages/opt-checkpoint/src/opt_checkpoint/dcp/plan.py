"""The plan of a save: which rank writes which parts of what all ranks hold; cached from one save to the next.

Every box is written once, by a rank that holds it, or in parts by several, with balanced load. A plan is a function of
what all ranks hold: keys, dtypes, shapes, boxes, replicas, objects. Its name is a hash of the fingerprints of all
ranks. Before a save, every rank sends the fingerprint of what it holds now, and the name of its cached plan. All ranks
receive the same messages, and reuse the plan only if every rank has cached the one that this save needs. After a
restart of a rank, or if the number or order of ranks or the shape of a tensor changes, all ranks make a new plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from opt_checkpoint.boxes import Array, columns_of, split_rows
from opt_checkpoint.dcp.coverage import TensorsOfRanks, validate_sharding_integrity
from opt_checkpoint.dcp.layout import LocalLayout
from opt_checkpoint.disk.data_file import crc32
from opt_checkpoint.state.sharded import is_main_replica

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


class AssignedParts(NamedTuple):
    """The parts that one rank writes.

    Args:
        box: (p,) indices of the rank's boxes, in the order in which it listed them.
        offsets: (p, axes) offsets of each part in its tensor; unused axes are last.
        sizes: (p, axes) its sizes.
        objects: unique keys of objects.
    """

    box: Array
    offsets: Array
    sizes: Array
    objects: list[str]

    @property
    def crc(self) -> int:
        """CRC-32 of the parts; rank 0 compares it to check that a rank wrote exactly these."""
        numbers = np.concatenate([self.box, self.offsets.ravel(), self.sizes.ravel()])
        return crc32(numbers.tobytes())


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalPlan:
    """Who writes what.

    Args:
        tensors: what all ranks hold.
        repeats: (pairs, 2) tensors that two ranks hold; their values must be equal in each save.
        parts: the parts of tensors that ranks write.
        assigned: the parts and objects that each rank writes, by rank.
        layouts: the layouts that the plan was made from.
    """

    tensors: TensorsOfRanks
    repeats: Array
    parts: Parts
    assigned: list[AssignedParts]
    layouts: Sequence[LocalLayout]

    @classmethod
    def of(cls, layouts: Sequence[LocalLayout], digests: Array, *, first_holder_only: bool) -> GlobalPlan:
        """Validate what all ranks hold, and assign every part to a rank.

        Args:
            layouts: what each rank holds, by rank.
            digests: of all ranks' tensors that may repeat, concatenated.
            first_holder_only: whether a plain tensor is written by the first rank that holds it, because the others'
                may differ.

        Raises:
            CheckpointingException: the layouts leave gaps, overlap or disagree, or values that must be equal differ.
        """
        tensors = TensorsOfRanks.of(layouts, first_holder_only=first_holder_only)
        repeating = np.flatnonzero(tensors.may_repeat & tensors.main)
        first_box = np.searchsorted(tensors.owner, repeating).tolist()
        last_box = np.searchsorted(tensors.owner, repeating + 1).tolist()
        first = dict[tuple[int, bytes, bytes], int]()  # of the main replicas with the same key and boxes
        pairs = []
        for number, low, high in zip(repeating.tolist(), first_box, last_box):
            place = tensors.offsets[low:high].tobytes(), tensors.sizes[low:high].tobytes()
            other = first.setdefault((tensors.key[number], *place), number)
            if low < high and other != number:
                pairs.append((other, number))
        repeats = np.array(pairs, np.int64).reshape(-1, 2)
        main = tensors.main.copy()  # the second of two equal blocks is a replica; validation rejects two that differ
        main[repeats[_are_equal(tensors, repeats, digests), 1]] = False
        checked = replace(tensors, main=main)
        validate_sharding_integrity(checked, [layout.objects for layout in layouts])
        parts = assign_parts(checked)
        first_of_rank = np.searchsorted(tensors.box_rank, np.arange(tensors.ranks))  # (ranks,)
        local_box = parts.box - first_of_rank[parts.rank]  # (parts,) as each rank numbers its boxes
        bounds = np.searchsorted(parts.rank, np.arange(tensors.ranks + 1)).tolist()  # of each rank's parts
        assigned = []
        for layout, start, stop in zip(layouts, bounds, bounds[1:]):
            objects = [item.unique_key for item in layout.objects if is_main_replica(item.replica_id)]
            box = local_box[start:stop]
            assigned.append(AssignedParts(box, parts.offsets[start:stop], parts.sizes[start:stop], objects))
        return cls(tensors=tensors, repeats=repeats, parts=parts, assigned=assigned, layouts=layouts)

    def fits(self, digests: Array) -> bool:
        """Return whether blocks that several ranks hold have equal values in a later save with the same layouts."""
        return bool(_are_equal(self.tensors, self.repeats, digests).all())


def _are_equal(tensors: TensorsOfRanks, repeats: Array, digests: Array) -> Array:
    """(pairs,) whether both tensors of each pair have equal values."""
    place = np.cumsum(tensors.may_repeat) - 1  # (tensors,) of the digest of those that have one
    digest_pairs = digests[place[repeats]]  # (pairs, 2)
    equal: Array = digest_pairs[:, 0] == digest_pairs[:, 1]
    return equal


class Offer(NamedTuple):
    """The message of a rank to all others before a save.

    Args:
        arguments: of the save, as text; they must be the same on all ranks.
        layout: fingerprint of what the rank holds.
        common: fingerprint of its plain values.
        cached: name of the plan that it has cached; empty for none.
    """

    arguments: Mapping[str, str]
    layout: bytes
    common: bytes
    cached: bytes


class CachedPlan(NamedTuple):
    """A plan and the rank that it was made for; saves share it and never change it.

    Args:
        name: from the agreement of the save; empty for no plan.
        rank: this rank.
        assigned: what this rank writes.
        plan: all of the plan, on rank 0; else None.
    """

    name: bytes = b""
    rank: int = -1
    assigned: AssignedParts | None = None
    plan: GlobalPlan | None = None


class PlanCache:
    """Cache of the last plan in a series of saves. Create one on each rank, and pass it to each save.

    Planning half a million chunks takes seconds. With a cache, later saves send a fingerprint instead of a description
    of what the ranks hold. `AsyncSaver` and `CheckpointManager` create their own.
    """

    def __init__(self) -> None:
        self.plan = CachedPlan()  # replaced by each save that made one; a save reads it once, at its start


# --- balance ---


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
    """Assign every box of a main replica to the least loaded rank that holds the same box, as any replica.

    A box that only one rank holds is written by that rank. The other boxes are assigned in Megatron-Core's greedy
    order: fewest holders first, then largest. Boxes larger than a twelfth of a rank's fair share, and than 64 KiB, are
    first cut into rows.

    Args:
        tensors: the validated contents of all ranks.
    """
    groups = _grouped(tensors)
    itemsize = tensors.itemsize[tensors.owner[groups.main]]  # (groups,)
    nbytes = np.prod(tensors.sizes[groups.main], axis=1) * itemsize  # (groups,)
    is_single = groups.holders == 1
    single = groups.members[groups.start[is_single]]  # (single,) the boxes with one holder
    load = np.bincount(tensors.box_rank[single], weights=nbytes[is_single], minlength=tensors.ranks)  # (ranks,)
    share = int(nbytes.sum()) / tensors.ranks
    largest = max(_SMALLEST_PIECE_BYTES, int(share / _PIECES_PER_RANK))
    count = np.where(is_single, 0, -(-nbytes // largest))  # (groups,) of pieces
    uncut = np.flatnonzero(count == 1)
    main = groups.main[uncut]
    pieces = [(uncut, tensors.offsets[main], tensors.sizes[main])]
    for number in np.flatnonzero(count > 1).tolist():
        rows = list(split_rows(tensors.box(groups.main[number]), int(count[number])))
        pieces.append((np.full(len(rows), number), *columns_of(rows, tensors.offsets.shape[1])))
    group, offsets, sizes = map(np.concatenate, zip(*pieces))  # (pieces,) and (pieces, axes)
    piece_bytes = np.prod(sizes, axis=1) * itemsize[group]  # (pieces,)
    order = np.lexsort((-piece_bytes, groups.holders[group]))
    chosen = _least_loaded(tensors, groups, group[order], piece_bytes[order], load.astype(np.int64))
    box = np.concatenate([single, chosen])  # (parts,)
    offsets = np.concatenate([tensors.offsets[single], offsets[order]])
    sizes = np.concatenate([tensors.sizes[single], sizes[order]])
    rank = tensors.box_rank[box]
    by_rank = np.argsort(rank, kind="stable")
    return Parts(rank[by_rank], box[by_rank], offsets[by_rank], sizes[by_rank])


def _grouped(tensors: TensorsOfRanks) -> _Groups:
    """Group equal boxes of one tensor, for groups that contain a main replica."""
    usable = np.flatnonzero(tensors.usable)
    columns = (tensors.box_key, tensors.offsets, tensors.sizes)
    rows = np.column_stack([column[usable] for column in columns])  # (usable, 1 + 2 axes)
    order = np.lexsort(rows.T)  # equal rows become neighbours, in the order of the ranks
    is_new = np.diff(rows[order], axis=0, prepend=-1).any(axis=1)  # (usable,) whether a row begins a group
    group = np.cumsum(is_new) - 1  # (usable,)
    box = usable[order]  # (usable,) by group
    rank = tensors.box_rank[box]
    is_main = tensors.main[tensors.owner[box]]
    main = np.full(int(group.max(initial=-1)) + 1, -1)  # (all groups,) the first main replica; -1 without one
    main[group[is_main][::-1]] = box[is_main][::-1]
    # A rank may hold a box twice, as a shared parameter; of these the first counts.
    is_member = is_new | (np.diff(rank, prepend=-1) != 0)
    is_member &= main[group] >= 0
    members = box[is_member]
    kept, start, holders = np.unique(group[is_member], return_index=True, return_counts=True)
    as_held = np.argsort(members[start], kind="stable")  # (groups,) in the order in which ranks hold them
    return _Groups(members, start[as_held], holders[as_held], main[kept][as_held])


def _least_loaded(tensors: TensorsOfRanks, groups: _Groups, group: Array, nbytes: Array, load: Array) -> Array:
    """(pieces,) the box of the least loaded holder of each piece, of the first rank among equals.

    Args:
        tensors: the contents of all ranks.
        groups: of equal boxes.
        group: (pieces,) the group of each piece.
        nbytes: (pieces,) its size.
        load: (ranks,) bytes that each rank writes already; is written to.
    """
    chosen = np.zeros(len(group), np.int64)
    for number, (group_id, size) in enumerate(zip(group.tolist(), nbytes.tolist())):
        boxes = groups.members[groups.start[group_id] :][: groups.holders[group_id]]
        box = boxes[np.argmin(load[tensors.box_rank[boxes]])]
        load[tensors.box_rank[box]] += size
        chosen[number] = box
    return chosen
