"""Wires: how the gradients of a bucket are summed over its replicas. `wire_of` chooses.

A wire is a generator of stages: it starts a collective, yields it, and continues once it is complete. `InFlight` runs
the generator, so that the stages of a bucket overlap with compute. To add a wire, write it in a file of this folder,
and a line in `wire_of`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from opt_config import DistributedDataParallelConfig
from opt_distributed.comm.collectives import Comm, Pending, Sizes
from opt_distributed.comm.device import Device, Event
from opt_distributed.comm.notices import CollectiveError as CollectiveError
from opt_distributed.comm.notices import at
from opt_distributed.comm.roles import Axes
from opt_distributed.layout import Bucket

SUM_TILE_NUMEL = 1 << 18
"""Elements that are summed in fp32 at a time: 1 MiB of scratch, which is enough work for any device."""


class Wire(Protocol):
    """Sums a bucket over ranks."""

    @property
    def is_staged(self) -> bool:
        """Whether work is left, or memory to free, after the first collective."""

    def stages(self, full: Tensor, shard: Tensor) -> Iterator[Pending]:
        """Write to `shard` (n,), which may be a view of `full`, this rank's part of the sum of `full` (size * n,)."""


@dataclass(frozen=True, slots=True)
class PlainSum:
    """A sum in the gradients' dtype: within an optimizer instance, then over the others.

    Every rank has the whole sum; or, `to_shards`, its shard, which is reduce-scattered before it is all-reduced.
    """

    axes: Axes
    to_shards: bool

    @property
    def is_staged(self) -> bool:
        """Only with several instances."""
        return self.axes.inter.size > 1

    def stages(self, full: Tensor, shard: Tensor) -> Iterator[Pending]:
        """Write `full`; or `shard`, with the rest of `full` undefined."""
        if self.to_shards:
            yield self.axes.dp.reduce_scatter_(shard, full, async_op=True)
        else:
            yield self.axes.dp.all_reduce_(full, async_op=True)
        if self.is_staged:
            yield self.axes.inter.all_reduce_(shard if self.to_shards else full, async_op=True)


@dataclass(frozen=True, slots=True)
class SumInFp32:
    """An all-to-all in the gradients' dtype; parts are summed in fp32, in rank order, and rounded once."""

    comm: Comm
    is_staged: ClassVar[bool] = True

    def stages(self, full: Tensor, shard: Tensor) -> Iterator[Pending]:
        """Write `shard`. Uses a second bucket of memory until the end of its only stage."""
        received = torch.empty_like(full)
        yield self.comm.all_to_all_(received, full, async_op=True)
        parts = received.view(self.comm.size, shard.numel())
        for start in range(0, shard.numel(), SUM_TILE_NUMEL):
            first, *others = parts[:, start : start + SUM_TILE_NUMEL]
            total = first.to(torch.float32)
            for part in others:
                total.add_(part)
            shard[start : start + SUM_TILE_NUMEL].copy_(total)


@dataclass(frozen=True, slots=True)
class SumToOwners:
    """Any sum to equal chunks, each of which is then sent to the owners of its parts: for shards of unequal size.

    The chunks are a second time on the wire: 1 / size of a bucket on each rank, or less where ranks own parts of their
    own chunks.
    """

    to_chunks: Wire
    comm: Comm
    bucket: Bucket
    is_staged: ClassVar[bool] = True

    def stages(self, full: Tensor, shard: Tensor) -> Iterator[Pending]:
        """Write `shard`, of any size. Uses a chunk of memory. Leaves the rest of `full` undefined.

        Two stages, whatever `to_chunks` has: all reductions of a group start their last stage before the next one
        begins, so that no rank starts it in another order.
        """
        rank = self.comm.rank
        size = self.comm.size
        sizes = Sizes(self.bucket.of_shard(rank, size), self.bucket.of_chunk(rank, size))
        chunk = torch.empty_like(full[: full.numel() // size])
        sums = self.to_chunks.stages(full, chunk)
        yield next(sums)
        for pending in sums:
            pending.wait()
        yield self.comm.all_to_all_(shard, chunk[: sum(sizes.sent)], sizes=sizes, async_op=True)


def to_owners(wire: Wire, bucket: Bucket, comm: Comm) -> Wire:
    """The wire of one bucket: `wire`, with an exchange after it if shards differ in size."""
    return SumToOwners(wire, comm, bucket) if bucket.cuts else wire


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Raise what a backend raises inside, as when a peer is gone, as a CollectiveError that begins with `what`."""
    try:
        with at(what):
            yield
    except Exception as error:
        raise CollectiveError(f"{what}: {error}") from error


class InFlight:
    """The pending stages of one bucket.

    On a CPU, the host waits for each stage before it starts the next, in `advance` or `finish`. On an asynchronous
    device, all stages are queued to the side stream at once, and only `finish` makes the current stream wait for it:
    neither the host nor compute waits between two stages.
    """

    _pending: Pending | None = None  # the present stage; None after the last

    def __init__(self, stages: Iterator[Pending], what: str, *, device: Device, is_staged: bool):
        self._stages = stages
        self._what = what
        self._device = device
        self._is_staged = is_staged
        self._done: Event | None = None  # of all stages
        if not (device.is_asynchronous and is_staged):
            self._next()
            return
        side = device.side_stream()
        side.wait_event(device.current_stream().record_event())
        with device.on(side):
            self._next()
            while self._pending is not None:
                self._next()
        self._done = side.record_event()

    def advance(self) -> None:
        """Wait for the present stage and start the next, if there are several. Does nothing if all are queued.

        Raises:
            CollectiveError: the stage failed, or exceeded the timeout of its group.
        """
        if self._is_staged and self._pending is not None:
            self._next()

    def finish(self) -> None:
        """Wait for all stages. On an asynchronous device, the current stream waits instead of the host."""
        while self._pending is not None:
            self._next()
        if self._done is not None:
            self._device.current_stream().wait_event(self._done)
            self._done = None

    @torch.no_grad()
    def _next(self) -> None:
        """Wait for the present stage, if there is one, and start the next."""
        with naming(self._what):
            if self._pending is not None:
                self._pending.wait()
            self._pending = next(self._stages, None)


def wire_of(config: DistributedDataParallelConfig, axes: Axes, *, num_shards: int) -> Wire:
    """Return the wire of a buffer."""
    if config.reduce_scatter_with_fp32_accumulation:
        return SumInFp32(axes.dp)
    return PlainSum(axes, to_shards=num_shards > 1)
