"""What all ranks hold as columns, and checks before a save that together they hold every element exactly once."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

import numpy as np

from opt_checkpoint.boxes import Array, Box, overlapping_pairs
from opt_checkpoint.dcp.layout import MAIN, MAY_REPEAT, PLAIN, LocalLayout
from opt_checkpoint.errors import CheckpointValueError
from opt_checkpoint.state.sharded import Path, Shape, ShardedObject, is_main_replica, path_text
from opt_checkpoint.state.tensors import dtype_from_name

_SHOWN = 8  # problems in a message
_Problems: TypeAlias = Iterator[tuple[int, str]]  # the index of a key, and what is wrong with it
_EXACT = 1 << 62  # above, products of sizes are computed by Python


@dataclass(frozen=True, kw_only=True)
class TensorsOfRanks:
    """The tensors that each rank holds, in the order of the ranks, and their boxes.

    Boxes with `usable` unset are never written, but are counted in box indices, so that a rank finds its own by index.

    Args:
        keys: the distinct keys, in the order of their first occurrence.
        dtype_names: the distinct dtypes.
        ranks: number of ranks.
        key: (t,) index of the key.
        rank: (t,) the rank that holds the tensor.
        dtype: (t,) index of the dtype.
        ndim: (t,) number of axes.
        shape: (t, axes) global shape; axes that a tensor lacks count 1.
        main: (t,) whether this is a main replica: coverage counts these; any rank that holds the box may write it.
        may_repeat: (t,) whether there is a digest of the values.
        owner: (b,) the index of the tensor of each box.
        box_key: (b,) the index of its key.
        box_rank: (b,) the rank that holds it, ascending.
        offsets: (b, axes) its offsets; 0 on axes that a tensor lacks.
        sizes: (b, axes) its sizes; 1 on axes that a tensor lacks.
        usable: (b,) whether its holder may write it; true for main replicas.
        itemsize: (t,) bytes of an element.
        first_of_key: (keys,) the first tensor of each key.
    """

    keys: list[str]
    dtype_names: list[str]
    ranks: int
    key: Array
    rank: Array
    dtype: Array
    ndim: Array
    shape: Array
    main: Array
    may_repeat: Array
    owner: Array
    box_key: Array
    box_rank: Array
    offsets: Array
    sizes: Array
    usable: Array
    itemsize: Array
    first_of_key: Array

    @classmethod
    def of(cls, layouts: Sequence[LocalLayout], *, first_holder_only: bool) -> TensorsOfRanks:
        """Return the columns of all ranks. Of a plain tensor, the first rank that holds it has the main replica.

        Args:
            layouts: by rank.
            first_holder_only: whether the other ranks' copies of plain tensors may not be written, because they may
                differ.
        """
        keys, key = _numbered(layout.keys for layout in layouts)
        dtypes, dtype = _numbered(layout.dtypes for layout in layouts)
        itemsize = np.array([dtype_from_name(name).itemsize for name in dtypes] or [1])  # (dtypes,)
        rank = np.repeat(np.arange(len(layouts)), [len(layout.keys) for layout in layouts])
        columns = map(np.concatenate, zip(*(layout.columns for layout in layouts)))
        flags, ndim, boxes, shapes, offsets, sizes = columns  # the last three are flat: axes one after another
        axes = max(1, int(ndim.max(initial=0)))
        owner = np.repeat(np.arange(len(key)), boxes)
        is_copy = flags & PLAIN > 0  # (t,) whether a plain tensor has the key of an earlier one
        plain = np.flatnonzero(is_copy)  # (plain tensors,) by rank, so that the first of a key is on the lowest one
        firsts = plain[np.unique(key[plain], return_index=True)[1]]  # (plain keys,)
        is_copy[firsts] = False
        return cls(
            keys=keys,
            dtype_names=dtypes,
            ranks=len(layouts),
            key=key,
            rank=rank,
            dtype=dtype,
            ndim=ndim,
            shape=_padded(shapes, ndim, axes, 1),
            main=(flags & MAIN > 0) & ~is_copy,
            may_repeat=flags & MAY_REPEAT > 0,
            owner=owner,
            box_key=key[owner],
            box_rank=rank[owner],
            offsets=_padded(offsets, ndim[owner], axes, 0),
            sizes=_padded(sizes, ndim[owner], axes, 1),
            usable=~is_copy[owner] if first_holder_only else np.full(len(owner), True),
            itemsize=itemsize[dtype],
            first_of_key=np.unique(key, return_index=True)[1],
        )

    def box(self, number: int) -> Box:
        """Return a box as an object."""
        axes = self.ndim[self.owner[number]]
        offsets = self.offsets[number, :axes].tolist()
        return Box(tuple(offsets), tuple(self.sizes[number, :axes].tolist()))

    def shape_of(self, number: int) -> Shape:
        """Return the global shape of a held tensor."""
        return tuple(self.shape[number, : self.ndim[number]].tolist())


def _numbered(per_rank: Iterable[Sequence[str]]) -> tuple[list[str], Array]:
    """The distinct names, in the order of their first occurrence, and the index of each name of all ranks."""
    numbers = dict[str, int]()
    names = chain.from_iterable(per_rank)
    column = np.fromiter((numbers.setdefault(name, len(numbers)) for name in names), np.int64)
    return list(numbers), column


def _padded(values: Array, ndim: Array, axes: int, fill: int) -> Array:
    """Tuples of `ndim` integers, given one after another, as rows of one array."""
    rows = np.full((len(ndim), axes), fill, np.int64)
    rows[np.arange(axes) < ndim[:, None]] = values
    return rows


def validate_sharding_integrity(tensors: TensorsOfRanks, objects: Sequence[Sequence[ShardedObject]]) -> None:
    """Check that the main replicas of all ranks tile every tensor, and that every object exists once.

    Args:
        tensors: the tensors that the ranks could write.
        objects: the objects of each rank, by rank.

    Raises:
        CheckpointingException: tensors of one key differ in dtype or global shape, overlap or leave a hole, objects
            are missing or double. All problems are reported at once, with keys and ranks.
    """
    first_problem: dict[int, str] = {}  # of each key
    for number, text in (*_misfits(tensors), *_overlaps(tensors), *_holes(tensors)):
        first_problem.setdefault(number, text)
    texts = [f"{tensors.keys[number]}: {text}" for number, text in sorted(first_problem.items())]
    texts += _object_problems(objects)
    if texts:
        more = f"\n... and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
        raise CheckpointValueError("the ranks' states do not fit together:\n" + "\n".join(texts[:_SHOWN]) + more)


def _object_problems(objects: Sequence[Sequence[ShardedObject]]) -> Iterator[str]:
    """Objects with several main replicas, and keys of which some are missing."""
    main_ranks = defaultdict[str, list[int]](list)
    mains_of_key = dict[str, set[str]]()  # empty for a key that only replicas hold
    shapes = {item.key: item.global_shape for items in objects for item in items}
    for rank, items in enumerate(objects):
        for item in items:
            mains = mains_of_key.setdefault(item.key, set())
            if is_main_replica(item.replica_id):
                main_ranks[item.unique_key].append(rank)
                mains.add(item.unique_key)
    for key, holders in main_ranks.items():
        if len(holders) > 1:
            yield f"Duplicate ShardedObject keys: {key} on ranks {holders}"
    for key, mains in mains_of_key.items():
        count = math.prod(shapes[key])
        if len(mains) != count:
            yield f"{key}: {len(mains)} of {count} ShardedObject are missing or too many"


def _misfits(t: TensorsOfRanks) -> _Problems:
    """Index and problem of each key whose dtype or shape differs between ranks."""
    first = t.first_of_key[t.key]  # (t,)
    has_other_axes = t.ndim != t.ndim[first]
    has_other_sizes = (t.shape != t.shape[first]).any(axis=1)
    has_other_dtype = t.dtype != t.dtype[first]
    for number in np.flatnonzero(has_other_axes | has_other_sizes | has_other_dtype).tolist():
        held = []
        for n in (first[number], number):
            dtype = t.dtype_names[t.dtype[n]]
            held.append(f"rank {t.rank[n]} has {dtype} {list(t.shape_of(n))}")
        yield t.key[number], ", ".join(held)


def _overlaps(t: TensorsOfRanks) -> _Problems:
    """Index and problem of each key whose main replicas overlap."""
    mains = np.flatnonzero(t.main[t.owner])  # (mains,) boxes
    for left, right in overlapping_pairs(t.box_key[mains], t.offsets[mains], t.sizes[mains]):
        pairs = np.sort(mains[np.stack([left, right], axis=1)], axis=1)  # (pairs, 2)
        for number, other_number in pairs.tolist():
            box = t.box(number)
            other = t.box(other_number)
            rank = t.box_rank[number]
            other_rank = t.box_rank[other_number]
            are_copies = rank != other_rank and box == other
            hint = "; of equal copies, only one may have replica_id 0" if are_copies else ""
            key = t.box_key[number]
            yield (
                key,
                f"Invalid access pattern: rank {rank} holds {box.text} and rank {other_rank} {other.text}, "
                f"both as main replica, and their values differ or are not known to be equal. Different tensors need "
                f"different keys, as add_prefix_for_sharding gives them, or for parts of one model "
                f"sharded_model(model, groups=...){hint}",
            )


def _holes(t: TensorsOfRanks) -> _Problems:
    """Index and problem of each key that its main replicas do not cover: disjoint boxes do if their volumes add up."""
    mains = np.flatnonzero(t.main[t.owner])  # (mains,) boxes
    shape = t.shape[t.first_of_key]  # (keys, axes)
    covered = np.zeros(len(t.keys), np.int64)  # elements
    numel = np.prod(t.sizes[mains], axis=1)  # (mains,)
    np.add.at(covered, t.box_key[mains], numel)
    is_huge = np.prod(shape.astype(np.float64), axis=1) >= _EXACT
    for key in np.flatnonzero(is_huge | (covered != np.prod(shape, axis=1))).tolist():
        total = math.prod(shape[key].tolist())
        if covered[key] == total:
            continue
        boxes = mains[t.box_key[mains] == key]
        ranks = np.unique(t.box_rank[boxes]).tolist()
        others = np.unique(t.rank[(t.key == key) & ~t.main]).tolist()
        replicas = f"; ranks {others} hold replicas, of which none is main (replica_id=0)" if others else ""
        whole = list(t.shape_of(t.first_of_key[key]))
        yield (
            key,
            f"Invalid access pattern: main replicas hold {covered[key]} of the {total} elements of "
            f"{whole} (ranks {ranks}){replicas}; a shard is missing. If ranks "
            f"have different parts of one model, or rank 0 lacks one of its buffers, pass "
            f"sharded_model(model, groups=...) or register the buffer on every rank",
        )


def common_differences(per_rank: Sequence[Mapping[Path, int]], plain: Sequence[Mapping[str, Path]]) -> list[str]:
    """Return values that differ between ranks, as `path (ranks ...)` with the ranks that differ from the first.

    Rank 0 writes plain values: each value that any rank has must be there, and equal. A plain tensor must be on all
    ranks, because a rank that lacks it may have forgotten it.

    Args:
        per_rank: fingerprints of plain values and plain tensors by path, for each rank.
        plain: paths of the plain tensors by key, for each rank.
    """
    first: dict[Path, int] = dict(per_rank[0])
    holders: dict[Path, list[int]] = defaultdict(list)
    for rank, (prints, paths) in enumerate(zip(per_rank, plain, strict=True)):
        for path in paths.values():
            if path in prints:
                first.setdefault(path, prints[path])
                holders[path].append(rank)
    differing: dict[Path, list[int]] = defaultdict(list)
    for rank, prints in enumerate(per_rank):
        for path, value in prints.items():
            if first.get(path) != value:
                differing[path].append(rank)
    texts = [f"{path_text(path)} (ranks {ranks})" for path, ranks in differing.items()]
    for path, ranks in holders.items():
        if len(ranks) < len(per_rank):
            texts.append(f"{path_text(path)} (a tensor on ranks {ranks} only)")
    return sorted(texts)


def without_writer(per_rank: Sequence[Mapping[Path, int]], plain: Sequence[Mapping[str, Path]]) -> list[str]:
    """Return the plain values that rank 0, which writes them, lacks. The arguments are those of `common_differences`.

    Plain tensors are left out: a rank that holds one writes it.
    """
    holders: dict[Path, list[int]] = defaultdict(list)  # of the values that rank 0 lacks
    for rank, (prints, paths) in enumerate(zip(per_rank, plain, strict=True)):
        for path in prints.keys() - per_rank[0].keys() - set(paths.values()):
            holders[path].append(rank)
    return sorted(f"{path_text(path)} (on ranks {ranks} only)" for path, ranks in holders.items())
