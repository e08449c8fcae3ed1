"""What all ranks hold as columns, and checks before a save that together they hold every element exactly once."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from opt_checkpoint.boxes import Array, Box, overlapping_pairs
from opt_checkpoint.dcp.layout import MAIN, MAY_REPEAT, PLAIN, LocalLayout
from opt_checkpoint.errors import CheckpointValueError
from opt_checkpoint.state.sharded import Shape, ShardedObject, is_main_replica
from opt_checkpoint.state.tensors import dtype_from_name
from opt_checkpoint.state.tree import Path, path_text

_SHOWN = 8
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
        main: (t,) whether this is a main replica.
        may_repeat: (t,) whether there is a digest of the values.
        owner: (b,) the index of the tensor of each box.
        offsets: (b, axes) its offsets; 0 on axes that a tensor lacks.
        sizes: (b, axes) its sizes; 1 on axes that a tensor lacks.
        usable: (b,) whether its holder may write it.
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
    offsets: Array
    sizes: Array
    usable: Array
    itemsize: Array
    first_of_key: Array

    @classmethod
    def of(cls, layouts: Sequence[LocalLayout], *, only_first: bool) -> TensorsOfRanks:
        """The columns of all ranks, with one main replica of every plain tensor, on the first rank that holds it.

        Args:
            layouts: by rank.
            only_first: whether the other ranks' copies of plain tensors may not be written, because they may differ.
        """
        keys = dict[str, int]()
        dtypes = dict[str, int]()
        key = np.fromiter((keys.setdefault(k, len(keys)) for layout in layouts for k in layout.keys), np.int64)
        dtype = np.fromiter((dtypes.setdefault(n, len(dtypes)) for layout in layouts for n in layout.dtypes), np.int64)
        ndim = np.concatenate([layout.ndim for layout in layouts])
        flags = np.concatenate([layout.flags for layout in layouts])
        owner = np.repeat(np.arange(len(key)), np.concatenate([layout.boxes for layout in layouts]))
        plain = np.flatnonzero(flags & PLAIN)
        again = np.ones(len(plain), bool)
        again[np.unique(key[plain], return_index=True)[1]] = False
        main = flags & MAIN > 0
        copies = np.zeros(len(key), bool)
        main[plain[again]] = False
        copies[plain[again]] = only_first
        axes = max(1, int(ndim.max(initial=0)))
        return cls(
            keys=list(keys),
            dtype_names=list(dtypes),
            ranks=len(layouts),
            key=key,
            rank=np.repeat(np.arange(len(layouts)), [len(layout.keys) for layout in layouts]),
            dtype=dtype,
            ndim=ndim,
            shape=_padded(np.concatenate([layout.shapes for layout in layouts]), ndim, axes, 1),
            main=main,
            may_repeat=flags & MAY_REPEAT > 0,
            owner=owner,
            offsets=_padded(np.concatenate([layout.offsets for layout in layouts]), ndim[owner], axes, 0),
            sizes=_padded(np.concatenate([layout.sizes for layout in layouts]), ndim[owner], axes, 1),
            usable=~copies[owner],
            itemsize=np.array([dtype_from_name(name).itemsize for name in dtypes] or [1])[dtype],
            first_of_key=np.unique(key, return_index=True)[1],
        )

    def box(self, number: int) -> Box:
        """A box as an object."""
        axes = int(self.ndim[self.owner[number]])
        return Box(tuple(self.offsets[number, :axes].tolist()), tuple(self.sizes[number, :axes].tolist()))

    def shape_of(self, number: int) -> Shape:
        """The global shape of a held tensor."""
        return tuple(self.shape[number, : self.ndim[number]].tolist())


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
    problems: dict[int, str] = {}
    for number, text in _tensor_problems(tensors):
        problems.setdefault(number, text)
    texts = [f"{tensors.keys[number]}: {text}" for number, text in sorted(problems.items())]
    ranks = defaultdict[str, list[int]](list)
    of_key = dict[str, set[str]]()
    shapes = {item.key: item.global_shape for items in objects for item in items}
    for rank, items in enumerate(objects):
        for item in items:
            mains = of_key.setdefault(item.key, set())  # of a key that only replicas hold it stays empty
            if is_main_replica(item.replica_id):
                ranks[item.unique_key].append(rank)
                mains.add(item.unique_key)
    texts += [f"Duplicate ShardedObject keys: {k} on ranks {r}" for k, r in ranks.items() if len(r) > 1]
    for key, mains in of_key.items():
        if len(mains) != math.prod(shapes[key]):
            texts.append(f"{key}: {len(mains)} of {math.prod(shapes[key])} ShardedObject are missing or too many")
    if texts:
        more = f"\n... and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
        raise CheckpointValueError("the ranks' states do not fit together:\n" + "\n".join(texts[:_SHOWN]) + more)


def _tensor_problems(tensors: TensorsOfRanks) -> Iterator[tuple[int, str]]:
    """Index and problem of each key whose dtype or shape differs between ranks, or whose main replicas overlap or do
    not cover it. Disjoint boxes cover a tensor if their volumes add up."""
    t = tensors
    first = t.first_of_key[t.key]
    same = (t.dtype == t.dtype[first]) & (t.ndim == t.ndim[first]) & (t.shape == t.shape[first]).all(axis=1)
    for number in np.flatnonzero(~same).tolist():
        a, b = (
            f"rank {t.rank[n]} has {t.dtype_names[t.dtype[n]]} {list(t.shape_of(n))}" for n in (first[number], number)
        )
        yield int(t.key[number]), f"{a}, {b}"
    mains = np.flatnonzero(t.main[t.owner] & t.usable)
    key_of_main = t.key[t.owner[mains]]
    for left, right in overlapping_pairs(key_of_main, t.offsets[mains], t.sizes[mains]):
        for numbers in np.sort(mains[np.stack([left, right], axis=1)], axis=1).tolist():
            box, other_box = map(t.box, numbers)
            rank, other = (int(t.rank[t.owner[number]]) for number in numbers)
            copies = "" if rank == other or box != other_box else "; of equal copies, only one may have replica_id 0"
            yield (
                int(t.key[t.owner[numbers[0]]]),
                f"Invalid access pattern: rank {rank} holds {_span(box)} and rank {other} {_span(other_box)}, "
                f"both as main replica, and their values differ or are not known to be equal. Different tensors need "
                f"different keys, as add_prefix_for_sharding gives them, or for parts of one model "
                f"sharded_model(model, groups=...){copies}",
            )
    shape = t.shape[t.first_of_key]
    covered = np.zeros(len(t.keys), np.int64)
    np.add.at(covered, key_of_main, np.prod(t.sizes[mains], axis=1))
    huge = np.prod(shape.astype(np.float64), axis=1) >= _EXACT
    for key in np.flatnonzero(huge | (covered != np.prod(shape, axis=1))).tolist():
        total = math.prod(shape[key].tolist())
        if covered[key] != total:
            ranks = sorted(set(t.rank[t.owner[mains]][key_of_main == key].tolist()))
            others = sorted(set(t.rank[(t.key == key) & ~t.main].tolist()))
            replicas = f"; ranks {others} hold replicas, of which none is main (replica_id=0)" if others else ""
            yield (
                key,
                f"Invalid access pattern: main replicas hold {covered[key]} of the {total} elements of "
                f"{list(t.shape_of(int(t.first_of_key[key])))} (ranks {ranks}){replicas}; a shard is missing. If ranks "
                f"have different parts of one model, or rank 0 lacks one of its buffers, pass "
                f"sharded_model(model, groups=...) or register the buffer on every rank",
            )


def _span(box: Box) -> str:
    return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(box.offsets, box.sizes)) + "]"


def common_differences(per_rank: Sequence[Mapping[Path, int]], plain: Sequence[Mapping[str, Path]]) -> list[str]:
    """Values that differ between ranks, as `path (ranks ...)` with the ranks that differ from the first.

    A rank need not have every plain value, but those that it has must be equal, and on rank 0, which writes them. Plain
    tensors must be on all ranks: one that a rank lacks may have been forgotten there.

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
    partial = {path: ranks for path, ranks in holders.items() if len(ranks) < len(per_rank)}
    texts = [f"{path_text(path)} (ranks {ranks})" for path, ranks in differing.items()]
    return sorted([*texts, *(f"{path_text(path)} (a tensor on ranks {r} only)" for path, r in partial.items())])
