"""Where every element lives: slots of parameters in buckets, shards of buckets on ranks. Integers only.

A `Layout` holds no tensor, process group or device, so that any rank can compute it for every rank. One of three
planners makes it: `flat_layout` and `replicated_layout` of this file, or `whole_layout`. Buffers allocate memory by it,
and the step reads from it what this rank owns::

    buffer   0 ─────────────────────────────────────────────────────────────▶ numel
    buckets  │ bucket 0                    │ bucket 1                       │   one collective for each
    chunks   │ rank 0  │ rank 1  │ rank 2  │ rank 0   │ rank 1   │ rank 2   │   equal, for collectives
    shards   │ rank 0 │ rank 1    │ rank 2 │ rank 0  │ rank 2                │   owned: the chunks, or whole slots
    slots    │ w9 │ w8   ···  │ w7 │ ···   │ w6 │ w5 │ ···                  │   ··· is padding

"Padded size" has several meanings, so `Bucket` has a name for each of its sizes.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import lcm, prod
from typing import NamedTuple

from opt_paramgroups import ParamId

Shape = tuple[int, ...]

START_MULTIPLE = 64
"""Elements. Every parameter starts on a multiple of it: 128 bytes in 16-bit formats, a whole cache line."""

BUCKET_MULTIPLE = 128
"""Elements. Every bucket ends on a multiple of it, so that kernels can process it in rows of 128 elements."""

HIGH_BUSBW_MULTIPLE = 2**16
"""Elements. Collectives reach full bus bandwidth only if the chunk that each rank sends is a large power of two."""

SHARD_MULTIPLE = 64
"""Elements, the default. Shards cut on its multiples are vectorised equally, so that bits agree at any world size."""


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


def start_multiple(shard_multiple: int) -> int:
    """The multiple, in elements, on which every parameter starts: lcm(64, ``shard_multiple``).

    If a start is a multiple of ``shard_multiple``, every cut is one too, counted from the parameter's own first
    element. So blocks of a block-quantised state are never split between ranks.
    """
    return lcm(START_MULTIPLE, shard_multiple)


def bucket_multiple(num_shards: int, *, shard_multiple: int, pad_for_high_busbw: bool) -> int:
    """The multiple, in elements, on which every bucket ends, so that it divides into ``num_shards`` aligned shards."""
    multiple = lcm(BUCKET_MULTIPLE, num_shards * shard_multiple)
    return lcm(multiple, HIGH_BUSBW_MULTIPLE) if pad_for_high_busbw else multiple


class LayoutError(ValueError):
    """A layout that cannot be made, or that does not match the parameters or process groups it is used with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamShape:
    """What a planner needs to know about a parameter."""

    id: ParamId
    shape: Shape
    shared_embedding: bool = False  # on several pipeline stages, which must cut it equally: alone in its bucket
    work: int | None = None  # of an update, relative to others; None: `update_cost` of the shape

    def __post_init__(self) -> None:
        if any(size < 0 for size in self.shape):
            raise LayoutError(f"shape of {self.id} is {self.shape}; sizes must be at least 0")

    @property
    def numel(self) -> int:
        """Elements; 1 for a scalar parameter."""
        return prod(self.shape)


class Slot(NamedTuple):
    """Elements [start, stop) of the whole buffer hold the parameter ``id``, row-major."""

    id: ParamId
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return self.stop - self.start


class Piece(NamedTuple):
    """The part of a parameter that one rank owns."""

    id: ParamId
    of_param: slice  # flat elements of the parameter
    of_shard: slice  # the same elements, within this rank's shard of the bucket

    @property
    def numel(self) -> int:
        """Elements of the piece; 0 only if it is the empty local shard of a DTensor (`BufferPlan.owned`)."""
        return int(self.of_param.stop - self.of_param.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A contiguous range of the buffer that is reduced and gathered as one. Its sizes, from largest to smallest:

    - ``numel``: with the padding that makes it divisible into shards; what collectives transfer;
    - ``extent_numel``: up to the end of the last slot, gaps between slots included;
    - ``params_numel``: the parameters without gaps.

    ``numel_unpadded`` is what Megatron-Core calls by this name *for this bucket*: ``params_numel``, ``extent_numel``,
    or the latter rounded up to the next start. Its checkpoints are checked against it. All other code names the size
    that it means.
    """

    slots: tuple[Slot, ...]  # in ascending order; at least one
    start: int
    stop: int
    numel_unpadded: int
    cuts: tuple[int, ...] = ()  # where each rank's shard starts, and where the last ends; empty: shards are the chunks

    @property
    def numel(self) -> int:
        """Elements of the bucket with all padding."""
        return self.stop - self.start

    @property
    def extent_numel(self) -> int:
        """Elements from the start of the bucket to the end of its last parameter."""
        return self.slots[-1].stop - self.start

    @property
    def params_numel(self) -> int:
        """Elements of the parameters, without any padding."""
        return sum(slot.numel for slot in self.slots)

    def chunk_bounds(self, num_shards: int) -> Sequence[int]:
        """Where each of ``num_shards`` equal parts of the bucket starts, and where the last ends."""
        if self.numel == 0:
            return (self.start,) * (num_shards + 1)
        return range(self.start, self.stop + 1, self.numel // num_shards)

    def shard_bounds(self, num_shards: int) -> Sequence[int]:
        """Where each rank's shard starts, and where the last ends."""
        return self.cuts or self.chunk_bounds(num_shards)

    def shard(self, rank: int, num_shards: int) -> slice:
        """Rank ``rank``'s shard as positions in the whole buffer. The only shard is that of every rank."""
        bounds = self.shard_bounds(num_shards)
        number = rank if num_shards > 1 else 0
        return slice(bounds[number], bounds[number + 1])

    def of_chunk(self, rank: int, num_shards: int) -> list[int]:
        """For each rank, the elements of its shard that are in chunk ``rank``. Together they are the chunk's first."""
        bounds = self.chunk_bounds(num_shards)
        return _overlaps(bounds[rank], bounds[rank + 1], self.shard_bounds(num_shards))

    def of_shard(self, rank: int, num_shards: int) -> list[int]:
        """For each chunk, its elements that are in rank ``rank``'s shard. Together they are the shard."""
        shard = self.shard(rank, num_shards)
        return _overlaps(shard.start, shard.stop, self.chunk_bounds(num_shards))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Buckets back to back from position 0, each cut into ``num_shards`` shards.

    Raises:
        LayoutError: a bucket does not start where the previous one ends, cannot be cut into equal chunks, or has cuts
            that do not cover its slots; a slot is outside its bucket or overlaps another; a parameter has two slots.
    """

    buckets: tuple[Bucket, ...]
    num_shards: int

    def __post_init__(self) -> None:
        end = 0
        for index, bucket in enumerate(self.buckets):
            where = f"bucket {index} [{bucket.start}, {bucket.stop})"
            num_shards = self.num_shards
            cuts = bucket.cuts
            if bucket.start != end:
                raise LayoutError(f"{where} must start at {end}, where the bucket before it ends")
            if bucket.numel % num_shards:
                raise LayoutError(f"{where} does not divide into {num_shards} equal shards; pad its end")
            are_in_order = len(cuts) == num_shards + 1 and cuts[0] == end and list(cuts) == sorted(cuts)
            if cuts and not (are_in_order and bucket.extent_numel <= cuts[-1] - end <= bucket.numel):
                raise LayoutError(
                    f"{where} has cuts {cuts} for {num_shards} shards; pass where each shard starts, in ascending "
                    "order from the bucket's start, and where the last one ends, after the last slot"
                )
            if not bucket.slots:
                raise LayoutError(f"{where} holds no parameter; leave it out")
            for slot in bucket.slots:
                if not end <= slot.start <= slot.stop <= bucket.stop:
                    raise LayoutError(f"slot {slot} in {where} is outside the bucket or overlaps the slot before it")
                end = slot.stop
            end = bucket.stop
        ids = [slot.id for slot in self.slots()]
        if len(set(ids)) != len(ids):
            twice = sorted({str(id) for id in ids if ids.count(id) > 1})
            raise LayoutError(f"parameters with more than one slot: {', '.join(twice)}; each has one")

    @property
    def numel(self) -> int:
        """Elements of the whole buffer, with all padding."""
        return self.buckets[-1].stop if self.buckets else 0

    @property
    def params_numel(self) -> int:
        """Elements of the parameters, without any padding."""
        return sum(bucket.params_numel for bucket in self.buckets)

    def slots(self) -> Iterator[Slot]:
        """Iterate over all slots, in ascending order."""
        for bucket in self.buckets:
            yield from bucket.slots

    def owned(self, rank: int) -> Iterator[tuple[int, Piece]]:
        """Iterate over the pieces that rank ``rank`` owns, in ascending order, each after the index of its bucket.

        Every element of every parameter has one owner, or, with one shard, is owned by every rank.
        """
        for index, bucket in enumerate(self.buckets):
            shard = bucket.shard(rank, self.num_shards)
            first = bisect_right(bucket.slots, shard.start, key=lambda slot: slot.stop)
            for slot in (bucket.slots[at] for at in range(first, len(bucket.slots))):
                if slot.start >= shard.stop:
                    break
                low = max(slot.start, shard.start)
                high = min(slot.stop, shard.stop)
                if low < high:
                    of_param = slice(low - slot.start, high - slot.start)
                    yield index, Piece(slot.id, of_param, slice(low - shard.start, high - shard.start))

    def fingerprint(self) -> str:
        """Return 64 hex digits, equal in every process for equal layouts, which ranks compare before collectives."""
        digest = sha256(str(self.num_shards).encode())
        for bucket in self.buckets:
            digest.update(f"|{bucket.start}:{bucket.stop}{bucket.cuts or ''}".encode())
            for slot in bucket.slots:
                digest.update(f",{slot.id!r}@{slot.start}:{slot.stop}".encode())
        return digest.hexdigest()


def check_plannable(
    params: tuple[ParamShape, ...], *, num_shards: int, bucket_size: int | None, shard_multiple: int
) -> None:
    """Check the arguments that all planners have in common.

    Raises:
        LayoutError: `num_shards`, `bucket_size` or `shard_multiple` is below 1, or a parameter was given twice.
    """
    if num_shards < 1:
        raise LayoutError(
            f"num_shards is {num_shards}; pass the size of the group that shares the buffer, 1 for one process"
        )
    if bucket_size is not None and bucket_size < 1:
        raise LayoutError(f"bucket_size is {bucket_size}; pass elements, 1 or more, or None for a single bucket")
    if shard_multiple < 1:
        raise LayoutError(
            f"shard_multiple is {shard_multiple}; pass elements, 1 or more; {SHARD_MULTIPLE} keeps bits equal"
        )
    if len({param.id for param in params}) != len(params):
        raise LayoutError("one parameter was passed twice; pass a tied parameter once, under its first name")


def flat_layout(
    params: Iterable[ParamShape],
    *,
    num_shards: int,
    bucket_size: int | None = None,  # a bucket closes once it has as many elements; None: one bucket
    shard_multiple: int = SHARD_MULTIPLE,
    pad_for_high_busbw: bool = False,
) -> Layout:
    """Place parameters in reverse registration order, in buckets cut into shards anywhere (ZeRO-1).

    Reverse, because backward produces the gradients of the last parameters first, so that bucket 0 is full, and
    reduced, first. A bucket closes once it holds ``bucket_size`` elements or more; a shared embedding closes the open
    bucket and is alone in its own. Starts are rounded to 64 elements, bucket ends to ``lcm(num_shards, 128)``, or
    with ``pad_for_high_busbw`` to ``lcm(num_shards, 128, 65536)``.

    Shard boundaries fall on multiples of ``shard_multiple`` elements, counted from the bucket's start and from each
    parameter's own start. With 64, an elementwise rule sees the same vectors at any world size and returns the same
    bits; with 1 the positions are exactly Megatron-Core's ``DistributedOptimizer``.

    Raises:
        LayoutError: see `check_plannable`; ``shard_multiple`` below 1.
    """
    shapes = tuple(params)
    check_plannable(shapes, num_shards=num_shards, bucket_size=bucket_size, shard_multiple=shard_multiple)
    buckets = _in_order(
        shapes,
        bucket_size=bucket_size,
        start_multiple=start_multiple(shard_multiple),
        end_multiple=bucket_multiple(num_shards, shard_multiple=shard_multiple, pad_for_high_busbw=pad_for_high_busbw),
        isolates=True,
    )
    return Layout(buckets=buckets, num_shards=num_shards)


def replicated_layout(params: Iterable[ParamShape], *, bucket_size: int | None = None) -> Layout:
    """Place parameters in reverse registration order without padding, in one shard: every rank owns everything.

    The gradients of a bucket are all-reduced. A shared embedding needs no bucket of its own, because nothing is cut.

    Raises:
        LayoutError: see `check_plannable`.
    """
    shapes = tuple(params)
    check_plannable(shapes, num_shards=1, bucket_size=bucket_size, shard_multiple=1)
    buckets = _in_order(shapes, bucket_size=bucket_size, start_multiple=1, end_multiple=1, isolates=False)
    return Layout(buckets=buckets, num_shards=1)


def _in_order(
    params: Sequence[ParamShape],
    *,
    bucket_size: int | None,
    start_multiple: int,
    end_multiple: int,
    isolates: bool,  # whether a shared embedding is alone in its bucket
) -> tuple[Bucket, ...]:
    """Parameters in reverse order. A bucket closes once it holds ``bucket_size`` elements, gaps included."""
    buckets: list[Bucket] = []
    slots: list[Slot] = []  # of the open bucket
    start = end = 0  # of the open bucket

    def close(*, at_aligned: bool = False) -> None:
        """Close the open bucket, if it holds a parameter.

        ``at_aligned`` counts the gap before the next start as part of ``numel_unpadded``, as Megatron-Core does for a
        bucket that a shared embedding cuts short.
        """
        nonlocal slots, start, end
        if slots:
            unpadded = round_up(end - start, start_multiple) if at_aligned else end - start
            stop = round_up(end, end_multiple)
            buckets.append(Bucket(slots=tuple(slots), start=start, stop=stop, numel_unpadded=unpadded))
            slots = []
            start = stop
            end = stop

    for param in reversed(params):
        is_alone = isolates and param.shared_embedding
        if is_alone:
            close(at_aligned=True)
        first = round_up(end, start_multiple)
        end = first + param.numel
        slots.append(Slot(param.id, first, end))
        if is_alone or (bucket_size is not None and end - start >= bucket_size):
            close()
    close()
    return tuple(buckets)


def _overlaps(start: int, stop: int, bounds: Sequence[int]) -> list[int]:
    """Elements of [start, stop) between each bound and the next."""
    numels = [0] * (len(bounds) - 1)
    for index in range(bisect_right(bounds, start) - 1, min(bisect_left(bounds, stop), len(numels))):
        numels[index] = min(stop, bounds[index + 1]) - max(start, bounds[index])
    return numels
