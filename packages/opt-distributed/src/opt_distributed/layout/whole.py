"""Whole matrices: `whole_layout` assigns them to the ranks that own them, `compute_layout` to those that update them.

Storage and compute differ where a rule needs a whole matrix and a rank stores only a part of it: under tensor
parallelism, FSDP2, or both. The layout lists matrices in the order that all ranks follow, and says for each which rank
stores which part and which ranks compute. `pieces.exchange` gathers parts before the rule and scatters them after it.

Ranks form a grid: axis k has ``sizes[k]`` of them, and each rank has a coordinate. Every axis cuts a matrix along one
dim, after the axes before it. So ranks whose coordinates share a prefix store one block together::

    (6, 4) over (2, 2) ranks, dims (0, 1)    (0,): rows 0-2    (0, 1): rows 0-2, cols 2-3    (1, 0): rows 3-5, cols 0-1
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from heapq import heappop, heapreplace
from itertools import accumulate, product
from math import prod
from typing import NamedTuple

from opt_distributed.layout.layout import (
    SHARD_MULTIPLE,
    Bucket,
    Layout,
    LayoutError,
    ParamShape,
    Shape,
    Slot,
    bucket_multiple,
    check_plannable,
    round_up,
    start_multiple,
)
from opt_paramgroups import ParamId

RUN_NUMEL = 1 << 26
"""Elements of whole matrices that a rank computes after one gather, which bounds their memory: 256 MiB in fp32."""

MANY_RUNS = 4
"""Matrices of small models are divided into this many runs, so that products of one hide the exchange of another."""

LEAST_RUN_NUMEL = 1 << 22
"""No run is made smaller than this for it: its exchange would take no longer than the start of a collective."""

RUNS_IN_MEMORY = 3
"""Runs whose matrices are in memory: one is computed, one has arrived, and one arrives or returns."""

LARGEST_IN_RUN = 1.6
"""A rank may also compute this many times the elements of the largest matrix, which its owner has to hold anyway.

With less, the other ranks wait for the owners of large matrices: 1.2 times the mean for a 70B model over 64 ranks.
"""

MIN_LARGEST = 2
"""A bucket holds this many times the elements of its largest parameter (or `num_shards` times, if that is less).

The owner of this parameter exchanges it in addition to its chunk, while other ranks wait: with 2, for at most half the
time of the reduction or gather itself. A larger number takes less time, but makes fewer buckets that overlap.
"""


def update_cost(shape: Shape) -> int:
    """Relative cost of a matrix rule: m·n·min(m, n), the multiplications of a Newton-Schulz product; a vector's numel.

    The cost of a stack of matrices is the cost of one times their number.
    """
    if len(shape) < 2:
        return prod(shape)
    return prod(shape) * min(shape[-2:])


def whole_layout(
    params: Iterable[ParamShape],
    *,
    num_shards: int,
    bucket_size: int | None = None,  # minimum elements of a bucket; None: one bucket
    shard_multiple: int = SHARD_MULTIPLE,
    pad_for_high_busbw: bool = False,
) -> Layout:
    """Assign whole parameters to ranks, in reverse registration order, so that all ranks have similar costs (`work`).

    Parameters become a bucket once they hold ``bucket_size`` elements and `MIN_LARGEST` times the largest of them. In
    a bucket, they are assigned in descending order of cost, each to the rank with the least cost so far (over all
    buckets) among those that own no more than their share of the elements. So no rank owns more than its share and one
    parameter. A rank's parameters follow each other; shards differ in size, and many are empty where a bucket has
    fewer parameters than there are ranks. Starts are rounded to 64 elements, bucket ends as in `flat_layout`.

    Raises:
        LayoutError: see `check_plannable`.
    """
    shapes = tuple(params)
    check_plannable(shapes, num_shards=num_shards, bucket_size=bucket_size, shard_multiple=shard_multiple)
    multiple = start_multiple(shard_multiple)
    end_multiple = bucket_multiple(num_shards, shard_multiple=shard_multiple, pad_for_high_busbw=pad_for_high_busbw)
    share = sum(round_up(param.numel, multiple) for param in shapes) / num_shards
    # Of every rank, over the buckets so far.
    numels = [0] * num_shards
    costs = [0] * num_shards
    cheapest = [(0, rank) for rank in range(num_shards)]  # a heap; ranks that own more than their share leave it

    def owner_of(param: ParamShape) -> int:
        """Assign a parameter. Of a shared embedding it is rank 0, because pipeline stages that share it must agree."""
        rank = 0
        while not param.shared_embedding:  # ends, because not all ranks can own more than their share
            cost, rank = cheapest[0]
            if numels[rank] > share:
                heappop(cheapest)
            elif cost < costs[rank]:
                heapreplace(cheapest, (costs[rank], rank))
            else:
                break
        numels[rank] += round_up(param.numel, multiple)
        costs[rank] += work_of(param)
        return rank

    def work_of(param: ParamShape) -> int:
        return update_cost(param.shape) if param.work is None else param.work

    buckets: list[Bucket] = []
    for chunk in _chunks(shapes, num_shards=num_shards, bucket_size=bucket_size):
        order = sorted(chunk, key=lambda param: (work_of(param), param.numel), reverse=True)
        owners = [owner_of(param) for param in order]
        position = start = buckets[-1].stop if buckets else 0
        slots = []
        cuts = [start] * (num_shards + 1)
        for index in sorted(range(len(order)), key=owners.__getitem__):
            slots.append(Slot(order[index].id, position, position + order[index].numel))
            position = round_up(slots[-1].stop, multiple)
            cuts[owners[index] + 1] = position
        stop = start + round_up(position - start, end_multiple)
        unpadded = sum(param.numel for param in chunk)
        bucket = Bucket(slots=tuple(slots), start=start, stop=stop, numel_unpadded=unpadded)
        cuts = list(accumulate(cuts, max))  # ranks without a parameter have an empty shard
        if cuts[:-1] != list(bucket.chunk_bounds(num_shards))[:-1]:
            bucket = replace(bucket, cuts=tuple(cuts))
        buckets.append(bucket)
    return Layout(buckets=tuple(buckets), num_shards=num_shards)


def _chunks(params: Sequence[ParamShape], *, num_shards: int, bucket_size: int | None) -> Iterator[list[ParamShape]]:
    """The parameters of each bucket, in reverse registration order; a shared embedding is alone in its own."""
    chunk: list[ParamShape] = []
    numel = largest = 0
    for param in reversed(params):
        is_full = bucket_size is not None and numel >= max(bucket_size, min(num_shards, MIN_LARGEST) * largest)
        if chunk and (is_full or param.shared_embedding or chunk[-1].shared_embedding):
            yield chunk
            chunk = []
            numel = 0
            largest = 0
        chunk.append(param)
        numel += param.numel
        largest = max(largest, param.numel)
    if chunk:
        yield chunk


Coordinate = tuple[int, ...]


class Computes(Enum):
    """How the ranks that store parts of a matrix divide the work of updating it."""

    PART = auto()  # each rank updates its part as if it were the matrix; no communication (Muon's "blockwise")
    JOINT = auto()  # each rank keeps its part, products are summed over ranks inside the rule (Muon's "distributed")
    OWNER = auto()  # one rank gathers, computes, and sends every part back; matrices are assigned to ranks by cost


class Block(NamedTuple):
    """A block of a matrix: its offset and its shape."""

    offset: Shape
    shape: Shape

    @property
    def numel(self) -> int:
        """Elements; 0 if there are more ranks than rows."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitMatrix:
    """A matrix that ranks store parts of.

    Raises:
        LayoutError: one of ``dims`` is not a dimension of ``shape``.
    """

    id: ParamId
    shape: Shape  # of the whole matrix
    dims: tuple[int, ...]  # the dim that each axis of ranks cuts
    owner: Coordinate = ()  # with `Computes.OWNER`, along the gathered axes: the rank that computes its update

    def __post_init__(self) -> None:
        for dim in self.dims:
            if not 0 <= dim < len(self.shape):
                raise LayoutError(
                    f"{self.id} is split along dim {dim}, but its shape is {self.shape}; pass 0 to ndim - 1"
                )

    def block(self, sizes: Shape, at: Coordinate) -> Block:
        """The block stored by the ranks whose coordinate begins with ``at``: cut by the first ``len(at)`` axes only.

        Sizes are those of `torch.chunk`: ``ceil(size / ranks)``, then a shorter one, then zeros.
        """
        offset = [0] * len(self.shape)
        shape = list(self.shape)
        for dim, ranks, index in zip(self.dims, sizes, at):
            run = -(-shape[dim] // ranks)
            start = min(index * run, shape[dim])
            stop = min((index + 1) * run, shape[dim])
            offset[dim] += start
            shape[dim] = stop - start
        return Block(tuple(offset), tuple(shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeLayout:
    """The matrices that one grid of ranks stores, in the order of their collectives.

    Raises:
        LayoutError: parts differ in size and `computes` needs equal ones, or a matrix has not one dim for each axis.
    """

    matrices: tuple[SplitMatrix, ...]
    sizes: Shape  # ranks along each axis
    computes: Computes
    kept: int = 0  # leading axes over which nothing is gathered: each of their blocks is a matrix to the rule

    def __post_init__(self) -> None:
        for matrix in self.matrices:
            if len(matrix.dims) != len(self.sizes):
                raise LayoutError(f"{matrix.id} is cut along dims {matrix.dims} by {len(self.sizes)} axes")
            parts = product(*map(range, self.sizes)) if self.computes is Computes.JOINT else ()
            if len({matrix.block(self.sizes, at).shape for at in parts}) > 1:
                raise LayoutError(
                    f"{matrix.id} of shape {matrix.shape} does not divide into {self.sizes} equal parts along dims "
                    f"{matrix.dims}, as muon_tp_mode='distributed' needs; pad it, or set muon_tp_mode='duplicated'"
                )

    @property
    def num_ranks(self) -> int:
        """Ranks that divide the work of a matrix."""
        return prod(self.sizes[self.kept :])

    def whole(self, matrix: SplitMatrix, at: Coordinate) -> Block:
        """Return the block that is one matrix to the rule at ``at``: all of ``matrix``, unless kept axes cut it."""
        return matrix.block(self.sizes, at[: self.kept] if self.computes is Computes.OWNER else at)

    def runs(self, ids: Iterable[ParamId], *, run_numel: int | None = None) -> list[list[ParamId]]:
        """Divide matrices into runs, each gathered and computed before the next one, in descending order of cost.

        A run grows by one matrix for each rank while no rank computes more than `max(run_numel, LARGEST_IN_RUN *
        largest)` elements, so that every rank is busy in every run but the last. Equal on all ranks. By default
        `run_numel` is a share of `MANY_RUNS` within `LEAST_RUN_NUMEL` and `RUN_NUMEL`.
        """
        chosen = set(ids)
        matrices = [matrix for matrix in self.matrices if matrix.id in chosen]
        matrices.sort(key=_work, reverse=True)  # stable
        first_rank = (0,) * len(self.sizes)  # has the largest blocks
        numels = {matrix.id: self.whole(matrix, first_rank).numel for matrix in matrices}
        if run_numel is None:
            share = sum(numels.values()) // (MANY_RUNS * self.num_ranks)
            run_numel = min(max(share, LEAST_RUN_NUMEL), RUN_NUMEL)
        limit = max(run_numel, LARGEST_IN_RUN * max(numels.values(), default=0))
        runs: list[list[ParamId]] = []
        held: Counter[Coordinate] = Counter()  # elements of the last run by owner
        for start in range(0, len(matrices), self.num_ranks):
            grown_by = matrices[start : start + self.num_ranks]
            added = _by_owner(grown_by, lambda matrix: numels[matrix.id])
            held += added
            if not runs or max(held.values(), default=0) > limit:
                runs.append([])
                held = added
            runs[-1] += [matrix.id for matrix in grown_by]
        return runs


class OwnerLoad(NamedTuple):
    """What owners hold and compute in the runs of a layout."""

    num_runs: int
    numel: int  # most elements of whole matrices that a rank holds at once: of `RUNS_IN_MEMORY` runs
    slowest: float  # work of the slowest owner of each run, in all, over the work of the mean rank; 1 is balanced
    mean: float  # work of the mean rank


def owner_load(layout: ComputeLayout) -> OwnerLoad:
    """Return the load of the owners of a layout with `Computes.OWNER`."""
    matrices = {matrix.id: matrix for matrix in layout.matrices}
    runs = [[matrices[id] for id in run] for run in layout.runs(matrices)]
    first_rank = (0,) * len(layout.sizes)
    held_by_run = [_by_owner(run, lambda matrix: layout.whole(matrix, first_rank).numel) for run in runs]
    work_of_slowest = sum(max(_by_owner(run, _work).values()) for run in runs)
    numel = 0
    for first in range(len(runs)):
        together = sum(held_by_run[first : first + RUNS_IN_MEMORY], Counter[Coordinate]())
        numel = max(numel, max(together.values(), default=0))
    mean = max(sum(map(_work, layout.matrices)), 1) / layout.num_ranks
    return OwnerLoad(len(runs), numel, work_of_slowest / mean, mean)


def _work(matrix: SplitMatrix) -> int:
    return update_cost(matrix.shape)


def _by_owner(matrices: Iterable[SplitMatrix], amount: Callable[[SplitMatrix], int]) -> Counter[Coordinate]:
    """Sum what the owners of these matrices hold or compute."""
    found: Counter[Coordinate] = Counter()
    for matrix in matrices:
        found[matrix.owner] += amount(matrix)
    return found


def compute_layout(
    matrices: Iterable[SplitMatrix], *, sizes: Shape, computes: Computes, kept: int = 0
) -> ComputeLayout:
    """Decide which ranks compute each matrix. Keeps the order of `matrices`.

    With `Computes.OWNER`, matrices are assigned in descending order of cost, each to the rank with the least cost so
    far. Ties are broken by order, so that every rank computes the same layout.

    Raises:
        LayoutError: as `ComputeLayout`.
    """
    given = tuple(matrices)
    owners: dict[ParamId, Coordinate] = {}
    if computes is Computes.OWNER:
        ranks = [(0, at) for at in product(*map(range, sizes[kept:]))]  # a heap, as all are equal
        for matrix in sorted(given, key=_work, reverse=True):
            cost, owners[matrix.id] = ranks[0]
            heapreplace(ranks, (cost + _work(matrix), owners[matrix.id]))
    owned = tuple(replace(matrix, owner=owners.get(matrix.id, ())) for matrix in given)
    return ComputeLayout(matrices=owned, sizes=sizes, computes=computes, kept=kept)
