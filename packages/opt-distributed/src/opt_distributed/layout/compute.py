"""Who computes the update of a matrix that several ranks store parts of: `ComputeLayout`. Integers only.

Storage and compute differ wherever a rule needs a whole matrix and a rank stores only a part of it: tensor
parallelism, FSDP2, both. The layout says, for each matrix and in the one order that all ranks follow, which part lies
where and who computes; the gather before the rule and the scatter after it are `step.compute`'s.

Ranks are a grid: axis k has ``sizes[k]`` of them, and a rank is a coordinate. An axis cuts every matrix along one dim,
one axis after the other, each what those before it have left. So ranks whose coordinates begin alike store a block::

    (6, 4) over (2, 2) ranks, dims (0, 1)    (0,): rows 0-2    (0, 1): rows 0-2, cols 2-3    (1, 0): rows 3-5, cols 0-1
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from heapq import heapify, heapreplace
from itertools import product
from math import prod
from typing import NamedTuple

from opt_distributed.layout.layout import LayoutError
from opt_distributed.layout.whole import update_cost
from opt_paramgroups import ParamId

Coordinate = tuple[int, ...]


class Computes(Enum):
    """How the ranks that store parts of a matrix share the work of updating it."""

    PART = auto()  # each rank updates its part as if it were the matrix; nothing travels (Muon's "blockwise")
    EVERY = auto()  # all gather, all compute the same, each keeps its part (Muon's "duplicated")
    JOINT = auto()  # each rank keeps its part, products are summed over ranks inside the rule (Muon's "distributed")
    OWNER = auto()  # one rank gathers, computes, and sends every part back; matrices are dealt out by cost

    @property
    def gathers(self) -> bool:
        """Whether parts travel before the rule runs."""
        return self in (Computes.EVERY, Computes.OWNER)


class Block(NamedTuple):
    """A block of a matrix: where it begins, and its shape."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements; 0 where ranks are more than rows."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitMatrix:
    """A matrix that ranks store parts of.

    Raises:
        LayoutError: one of ``dims`` is not a dimension of ``shape``.
    """

    id: ParamId
    shape: tuple[int, ...]  # of the whole matrix
    dims: tuple[int, ...]  # that each axis of ranks cuts

    def __post_init__(self) -> None:
        for dim in self.dims:
            if not 0 <= dim < len(self.shape):
                raise LayoutError(
                    f"{self.id} is split along dim {dim}, but its shape is {self.shape}; give 0 to ndim - 1"
                )

    def block(self, sizes: tuple[int, ...], at: Coordinate) -> Block:
        """What the first ``len(at)`` axes leave to the ranks whose coordinate begins with ``at``.

        Cut as `torch.chunk` cuts: runs of ``ceil(size / ranks)``, the last one shorter, those after it empty.
        """
        offset, shape = [0] * len(self.shape), list(self.shape)
        for dim, ranks, index in zip(self.dims, sizes, at):
            run = -(-shape[dim] // ranks)
            start, stop = min(index * run, shape[dim]), min((index + 1) * run, shape[dim])
            offset[dim] += start
            shape[dim] = stop - start
        return Block(tuple(offset), tuple(shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeSlot:
    """One matrix and who computes its update."""

    matrix: SplitMatrix
    owner: Coordinate | None = None  # along the gathered axes: the rank that computes, for `Computes.OWNER` only


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeLayout:
    """The matrices that one grid of ranks stores, in the order in which every rank meets their collectives.

    Raises:
        LayoutError: parts that have to be equal and are not; a matrix cut by another number of axes.
    """

    slots: tuple[ComputeSlot, ...]
    sizes: tuple[int, ...]  # ranks along each axis
    computes: Computes
    kept: int = 0  # axes, counted from the first, over which nothing is gathered: each of their blocks is a matrix

    def __post_init__(self) -> None:
        for slot in self.slots:
            if len(slot.matrix.dims) != len(self.sizes):
                raise LayoutError(f"{slot.matrix.id} is cut along dims {slot.matrix.dims} by {len(self.sizes)} axes")
            if self.computes is Computes.JOINT:
                self._check_equal(slot.matrix)

    @property
    def num_ranks(self) -> int:
        """Ranks that share the work of a matrix."""
        return prod(self.sizes[self.kept :])

    def block(self, slot: ComputeSlot, at: Coordinate) -> Block:
        """The part of ``slot`` at ``at``, or the union of all parts whose coordinates begin so."""
        return slot.matrix.block(self.sizes, at)

    def whole(self, slot: ComputeSlot, at: Coordinate) -> Block:
        """What the rule sees of ``slot``, for the ranks around ``at``: all of it but for the axes that are kept."""
        return self.block(slot, at[: self.kept] if self.computes.gathers else at)

    def computes_at(self, slot: ComputeSlot, at: Coordinate) -> bool:
        """Whether the rank at ``at`` runs the rule on ``slot`` or on its part of it."""
        return slot.owner is None or slot.owner == at[self.kept :]

    def computed_at(self, at: Coordinate) -> Iterator[ComputeSlot]:
        """What the rank at ``at`` runs the rule on, in order."""
        return (slot for slot in self.slots if self.computes_at(slot, at))

    def _check_equal(self, matrix: SplitMatrix) -> None:
        for at in product(*map(range, self.sizes)):
            if matrix.block(self.sizes, at).shape != matrix.block(self.sizes, (0,) * len(at)).shape:
                raise LayoutError(
                    f"{matrix.id} of shape {matrix.shape} does not divide into {self.sizes} equal parts along dims "
                    f"{matrix.dims}, as muon_tp_mode='distributed' needs; pad it, or set muon_tp_mode='duplicated'"
                )


def compute_layout(
    matrices: Iterable[SplitMatrix], *, sizes: tuple[int, ...], computes: Computes, kept: int = 0
) -> ComputeLayout:
    """Says who computes each matrix, in the order given.

    With `Computes.OWNER` the costliest goes first, each to the rank with the least so far; equal costs go by order, so
    every rank finds the same.

    Raises:
        LayoutError: as `ComputeLayout`.
    """
    given = tuple(matrices)
    owners = _deal(given, sizes[kept:]) if computes is Computes.OWNER else {}
    slots = tuple(ComputeSlot(matrix=matrix, owner=owners.get(matrix.id)) for matrix in given)
    return ComputeLayout(slots=slots, sizes=sizes, computes=computes, kept=kept)


def _deal(matrices: tuple[SplitMatrix, ...], sizes: tuple[int, ...]) -> dict[ParamId, Coordinate]:
    ranks = [(0, at) for at in product(*map(range, sizes))]
    heapify(ranks)
    owners = {}
    for matrix in sorted(matrices, key=lambda matrix: update_cost(matrix.shape), reverse=True):
        cost, at = ranks[0]
        owners[matrix.id] = at
        heapreplace(ranks, (cost + update_cost(matrix.shape), at))
    return owners
