"""The flat planners: parameters back to back, cut into shards at any element (ZeRO-1), or not cut at all."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from opt_distributed.layout.layout import (
    SHARD_MULTIPLE,
    Bucket,
    Layout,
    ParamShape,
    Slot,
    bucket_multiple,
    check_plannable,
    round_up,
    start_multiple,
)


def flat_layout(
    params: Iterable[ParamShape],
    *,
    num_shards: int,
    bucket_size: int | None = None,  # a bucket closes once it has as many elements; None: one bucket
    shard_multiple: int = SHARD_MULTIPLE,
    pad_for_high_busbw: bool = False,
) -> Layout:
    """Parameters in reverse registration order, in buckets whose shards ignore parameter boundaries (ZeRO-1).

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
    run = _Run(
        start_multiple=start_multiple(shard_multiple),
        end_multiple=bucket_multiple(num_shards, shard_multiple=shard_multiple, pad_for_high_busbw=pad_for_high_busbw),
    )
    for param in reversed(shapes):
        if param.shared_embedding:
            run.close(at_aligned=True)
        run.place(param)
        if param.shared_embedding or (bucket_size is not None and run.numel >= bucket_size):
            run.close()
    run.close()
    return Layout(buckets=tuple(run.buckets), num_shards=num_shards)


def replicated_layout(params: Iterable[ParamShape], *, bucket_size: int | None = None) -> Layout:
    """Parameters in reverse registration order without padding, one shard: every rank owns everything.

    The gradients of a bucket are all-reduced. A shared embedding needs no bucket of its own, because nothing is cut.

    Raises:
        LayoutError: see `check_plannable`.
    """
    shapes = tuple(params)
    check_plannable(shapes, num_shards=1, bucket_size=bucket_size, shard_multiple=1)
    run = _Run(start_multiple=1, end_multiple=1)
    for param in reversed(shapes):
        run.place(param)
        if bucket_size is not None and run.numel >= bucket_size:
            run.close()
    run.close()
    return Layout(buckets=tuple(run.buckets), num_shards=1)


@dataclass(slots=True, kw_only=True)
class _Run:
    """The buckets closed so far, and the slots of the open one."""

    start_multiple: int
    end_multiple: int
    buckets: list[Bucket] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    start: int = 0

    @property
    def end(self) -> int:
        return self.slots[-1].stop if self.slots else self.start

    @property
    def numel(self) -> int:
        return self.end - self.start

    def place(self, param: ParamShape) -> None:
        start = round_up(self.end, self.start_multiple)
        self.slots.append(Slot(param.id, start, start + param.numel))

    def close(self, *, at_aligned: bool = False) -> None:
        """Close the open bucket, if it holds a parameter.

        ``at_aligned`` counts the gap before the next start as part of ``numel_unpadded``, as Megatron-Core does for a
        bucket that a shared embedding cuts short.
        """
        if not self.slots:
            return
        unpadded = round_up(self.numel, self.start_multiple) if at_aligned else self.numel
        stop = round_up(self.end, self.end_multiple)
        self.buckets.append(Bucket(slots=tuple(self.slots), start=self.start, stop=stop, numel_unpadded=unpadded))
        self.slots, self.start = [], stop
