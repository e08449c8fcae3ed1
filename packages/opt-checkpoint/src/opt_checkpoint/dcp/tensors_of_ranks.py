"""The sharded tensors of all ranks as columns, which the coordinator checks and assigns to ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from opt_checkpoint.boxes.box import Box
from opt_checkpoint.dcp.local_contents import MAIN, MAY_REPEAT, PLAIN, LocalLayout
from opt_checkpoint.disk.columns import Array
from opt_checkpoint.disk.dtype_names import dtype_from_name
from opt_checkpoint.state.sharded import Shape


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

    @classmethod
    def of(cls, layouts: Sequence[LocalLayout], *, only_first: bool) -> TensorsOfRanks:
        """The columns of all ranks, with one main replica of every plain tensor, on the first rank that holds it.

        Args:
            layouts: by rank.
            only_first: whether the other ranks' copies of plain tensors may not be written, because they may differ.
        """
        keys, dtypes = dict[str, int](), dict[str, int]()
        key = np.fromiter((keys.setdefault(k, len(keys)) for own in layouts for k in own.keys), np.int64)
        dtype = np.fromiter((dtypes.setdefault(n, len(dtypes)) for own in layouts for n in own.dtypes), np.int64)
        ndim, flags = np.concatenate([own.ndim for own in layouts]), np.concatenate([own.flags for own in layouts])
        owner = np.repeat(np.arange(len(key)), np.concatenate([own.boxes for own in layouts]))
        plain = np.flatnonzero(flags & PLAIN)
        again = np.ones(len(plain), bool)
        again[np.unique(key[plain], return_index=True)[1]] = False
        main, copies = flags & MAIN > 0, np.zeros(len(key), bool)
        main[plain[again]] = False
        copies[plain[again]] = only_first
        axes = max(1, int(ndim.max(initial=0)))
        return cls(
            keys=list(keys),
            dtype_names=list(dtypes),
            ranks=len(layouts),
            key=key,
            rank=np.repeat(np.arange(len(layouts)), [len(own.keys) for own in layouts]),
            dtype=dtype,
            ndim=ndim,
            shape=_padded(np.concatenate([own.shapes for own in layouts]), ndim, axes, 1),
            main=main,
            may_repeat=flags & MAY_REPEAT > 0,
            owner=owner,
            offsets=_padded(np.concatenate([own.offsets for own in layouts]), ndim[owner], axes, 0),
            sizes=_padded(np.concatenate([own.sizes for own in layouts]), ndim[owner], axes, 1),
            usable=~copies[owner],
        )

    def repeats(self) -> Array:
        """(pairs, 2) tensors that two ranks hold as main replicas, and whose values must then be equal."""
        at = np.flatnonzero(self.may_repeat & self.main)
        bounds = np.searchsorted(self.owner, np.stack([at, at + 1], axis=1))
        first: dict[tuple[int, bytes, bytes], int] = {}
        pairs = []
        for number, (low, high) in zip(at.tolist(), bounds.tolist()):
            if low < high:
                block = int(self.key[number]), self.offsets[low:high].tobytes(), self.sizes[low:high].tobytes()
                if (other := first.setdefault(block, number)) != number:
                    pairs.append((other, number))
        return np.array(pairs, np.int64).reshape(-1, 2)

    @cached_property
    def first_of_key(self) -> Array:
        """(keys,) the first tensor of each key."""
        first = np.zeros(len(self.keys), np.int64)
        first[self.key[::-1]] = np.arange(len(self.key))[::-1]
        return first

    @property
    def itemsize(self) -> Array:
        """(t,) bytes of an element."""
        sizes: Array = np.array([dtype_from_name(name).itemsize for name in self.dtype_names] or [1])[self.dtype]
        return sizes

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
