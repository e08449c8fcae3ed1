"""The sharded tensors of all ranks as columns, which the coordinator checks and assigns to ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from opt_checkpoint.boxes.box import Box
from opt_checkpoint.dcp.local_contents import MAIN, MAY_REPEAT, PLAIN, LocalTensors
from opt_checkpoint.disk.columns import Array
from opt_checkpoint.disk.dtype_names import dtype_from_name
from opt_checkpoint.state.sharded import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTensors:
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
        plain: (t,) whether this is a plain tensor of the state.
        owner: (b,) the index of the tensor of each box.
        offsets: (b, axes) its offsets; 0 on axes that a tensor lacks.
        sizes: (b, axes) its sizes; 1 on axes that a tensor lacks.
        usable: (b,) whether its holder may write it.
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
    plain: Array
    owner: Array
    offsets: Array
    sizes: Array
    usable: Array

    @classmethod
    def of(cls, per_rank: Sequence[LocalTensors]) -> HeldTensors:
        """The columns of all ranks, by rank."""
        keys, dtypes = dict[str, int](), dict[str, int]()
        key = np.fromiter((keys.setdefault(k, len(keys)) for own in per_rank for k in own.keys), np.int64)
        tables = {own.dtype_names for own in per_rank}
        numbers = {
            names: np.array([dtypes.setdefault(n, len(dtypes)) for n in names] or [0]) for names in sorted(tables)
        }
        ndim, flags = (np.concatenate([own[i] for own in per_rank]) for i in _fields("ndim", "flags"))
        axes = max(1, int(ndim.max(initial=0)))
        owner = np.repeat(np.arange(len(key)), np.concatenate([own.boxes for own in per_rank]))
        shapes, offsets, sizes = (
            np.concatenate([own[i] for own in per_rank]) for i in _fields("shapes", "offsets", "sizes")
        )
        return cls(
            keys=list(keys),
            dtype_names=list(dtypes),
            ranks=len(per_rank),
            key=key,
            rank=np.repeat(np.arange(len(per_rank)), [len(own.keys) for own in per_rank]),
            dtype=np.concatenate([numbers[own.dtype_names][own.dtypes] for own in per_rank]),
            ndim=ndim,
            shape=_padded(shapes, ndim, axes, 1),
            main=flags & MAIN > 0,
            may_repeat=flags & MAY_REPEAT > 0,
            plain=flags & PLAIN > 0,
            owner=owner,
            offsets=_padded(offsets, ndim[owner], axes, 0),
            sizes=_padded(sizes, ndim[owner], axes, 1),
            usable=np.ones(len(owner), bool),
        )

    def with_plain_on_one(self, *, only_first: bool) -> HeldTensors:
        """A copy with one main replica of every plain tensor, on the first rank that holds it.

        Args:
            only_first: whether the other ranks' copies may not be written, because they may differ.
        """
        at = np.flatnonzero(self.plain)
        again = np.ones(len(at), bool)
        again[np.unique(self.key[at], return_index=True)[1]] = False
        main, usable = self.main.copy(), self.usable
        main[at[again]] = False
        if only_first:
            copies = np.zeros(len(main), bool)
            copies[at[again]] = True
            usable = ~copies[self.owner]
        return replace(self, main=main, usable=usable)

    def repeats(self) -> Repeats:
        """Blocks that several ranks hold as main replicas, and whose values must then be equal."""
        at = np.flatnonzero(self.may_repeat & self.main)
        bounds = np.searchsorted(self.owner, np.stack([at, at + 1], axis=1))
        first: dict[tuple[int, bytes, bytes], int] = {}
        pairs = []
        for number, (low, high) in zip(at.tolist(), bounds.tolist()):
            if low < high:
                block = int(self.key[number]), self.offsets[low:high].tobytes(), self.sizes[low:high].tobytes()
                if (other := first.setdefault(block, number)) != number:
                    pairs.append((other, number))
        found = np.array(pairs, np.int64).reshape(-1, 2)
        return Repeats(found[:, 0], found[:, 1])

    def with_one_main_each(self, repeats: Repeats, digests: Array) -> HeldTensors:
        """A copy in which only the first of several blocks with equal values is the main replica.

        Blocks with other values stay main replicas, which validation rejects.

        Args:
            repeats: from `repeats`.
            digests: of the tensors with `may_repeat`, in order.
        """
        main = self.main.copy()
        main[repeats.again[repeats.are_equal(self, digests)]] = False
        return replace(self, main=main)

    @property
    def itemsize(self) -> Array:
        """(t,) bytes of an element."""
        sizes: Array = np.array([dtype_from_name(name).itemsize for name in self.dtype_names] or [1])[self.dtype]
        return sizes

    @property
    def first_box(self) -> Array:
        """(ranks,) the index of the first box of each rank."""
        first: Array = np.searchsorted(self.rank[self.owner], np.arange(self.ranks))
        return first

    def box(self, number: int) -> Box:
        """A box as an object."""
        axes = int(self.ndim[self.owner[number]])
        return Box(tuple(self.offsets[number, :axes].tolist()), tuple(self.sizes[number, :axes].tolist()))

    def shape_of(self, number: int) -> Shape:
        """The global shape of a held tensor."""
        return tuple(self.shape[number, : self.ndim[number]].tolist())

    def dtype_name(self, number: int) -> str:
        """The dtype of a held tensor."""
        return self.dtype_names[int(self.dtype[number])]


class Repeats(NamedTuple):
    """Pairs of held tensors, by index: `again[i]` is the same block as `first[i]`."""

    first: Array
    again: Array

    def are_equal(self, held: HeldTensors, digests: Array) -> Array:
        """For each pair, whether its values are equal."""
        place = np.cumsum(held.may_repeat) - 1
        equal: Array = digests[place[self.first]] == digests[place[self.again]]
        return equal


def _fields(*names: str) -> list[int]:
    return [LocalTensors._fields.index(name) for name in names]


def _padded(values: Array, ndim: Array, axes: int, fill: int) -> Array:
    """Tuples of `ndim` integers, given one after another, as rows of one array."""
    rows = np.full((len(ndim), axes), fill, np.int64)
    rows[np.arange(axes) < ndim[:, None]] = values
    return rows
