"""Who computes the update of a matrix that several ranks store parts of: `ComputeLayout`. Integers only.

Storage and compute differ wherever a rule needs a whole matrix and a rank stores only a slice of it: tensor
parallelism, FSDP2. The layout says, for each matrix and in the one order that all ranks follow, who computes and what
travels; the gather before the rule and the scatter after it are done by whoever holds a `Comm`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from heapq import heapify, heapreplace

from opt_distributed.layout.layout import LayoutError
from opt_distributed.layout.whole import update_cost
from opt_paramgroups import ParamId


class Computes(Enum):
    """How the ranks that store parts of a matrix share the work of updating it."""

    PART = auto()  # each rank updates its part as if it were the matrix; nothing travels (Muon's "blockwise")
    EVERY = auto()  # all gather, all compute the same, each keeps its part (Muon's "duplicated")
    JOINT = auto()  # each rank keeps its part, products are summed over ranks inside the rule (Muon's "distributed")
    OWNER = auto()  # one rank gathers, computes, and sends every part back; matrices are dealt out by cost


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitMatrix:
    """A matrix stored in equal parts along one dimension.

    Raises:
        LayoutError: ``dim`` is not a dimension of ``shape``.
    """

    id: ParamId
    shape: tuple[int, ...]  # of the whole matrix
    dim: int | None  # the dimension it is split along; None: every rank stores all of it

    def __post_init__(self) -> None:
        if self.dim is not None and not 0 <= self.dim < len(self.shape):
            raise LayoutError(
                f"{self.id} is split along dim {self.dim}, but its shape is {self.shape}; give 0 to ndim - 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeSlot:
    """One matrix and who computes its update."""

    matrix: SplitMatrix
    computes: Computes
    owner: int | None = None  # the rank that computes, for `Computes.OWNER` only

    def is_computed_by(self, rank: int) -> bool:
        """Whether ``rank`` runs the rule on this matrix or on its part of it."""
        return self.owner is None or self.owner == rank

    @property
    def gathers(self) -> bool:
        """Whether parts travel before the rule runs."""
        return self.computes in (Computes.EVERY, Computes.OWNER)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeLayout:
    """The matrices in the order in which every rank meets their collectives."""

    slots: tuple[ComputeSlot, ...]
    num_ranks: int

    def computed_by(self, rank: int) -> Iterator[ComputeSlot]:
        """What ``rank`` runs the rule on, in order."""
        return (slot for slot in self.slots if slot.is_computed_by(rank))

    def part_shape(self, slot: ComputeSlot) -> tuple[int, ...]:
        """The shape of each rank's part of a matrix."""
        shape, dim = slot.matrix.shape, slot.matrix.dim
        if dim is None:
            return shape
        return (*shape[:dim], shape[dim] // self.num_ranks, *shape[dim + 1 :])


def compute_layout(matrices: Iterable[SplitMatrix], *, num_ranks: int, computes: Computes) -> ComputeLayout:
    """Says who computes each matrix, in the order given.

    A matrix that is not split is `Computes.PART` whatever is asked: its only part is the whole. With `Computes.OWNER`
    the costliest goes first, each to the rank with the least so far; equal costs go by order, so every rank finds the
    same.

    Raises:
        LayoutError: a dimension that does not divide into ``num_ranks`` equal parts.
    """
    given = tuple(matrices)
    for matrix in given:
        _check_divides(matrix, num_ranks)
    owners = _deal(given, num_ranks) if computes is Computes.OWNER else {}
    slots = (
        ComputeSlot(matrix=matrix, computes=Computes.PART)
        if matrix.dim is None
        else ComputeSlot(matrix=matrix, computes=computes, owner=owners.get(matrix.id))
        for matrix in given
    )
    return ComputeLayout(slots=tuple(slots), num_ranks=num_ranks)


def _deal(matrices: tuple[SplitMatrix, ...], num_ranks: int) -> dict[ParamId, int]:
    ranks = [(0, rank) for rank in range(num_ranks)]
    heapify(ranks)
    owners = {}
    for matrix in sorted(matrices, key=lambda matrix: update_cost(matrix.shape), reverse=True):
        if matrix.dim is not None:
            cost, rank = ranks[0]
            owners[matrix.id] = rank
            heapreplace(ranks, (cost + update_cost(matrix.shape), rank))
    return owners


def _check_divides(matrix: SplitMatrix, num_ranks: int) -> None:
    if matrix.dim is not None and matrix.shape[matrix.dim] % num_ranks:
        raise LayoutError(
            f"{matrix.id} of shape {matrix.shape} does not divide into {num_ranks} equal parts along dim {matrix.dim}; "
            "pad that dimension, or keep the matrix whole"
        )
