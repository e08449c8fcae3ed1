"""How a bucket's gradients are summed over ranks: in place, into shards, or in fp32 from what came over a 16-bit wire.

A `Wire` is a recipe of stages: a generator that starts a collective, yields what is pending, and goes on once it is
done. `InFlight` drives it, so that one bucket's stages overlap with compute.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from opt_distributed.comm.collectives import Comm, Pending
from opt_distributed.comm.device import Device, Event, Host
from opt_distributed.comm.groups import Axes

SUM_TILE_NUMEL = 1 << 18
"""Elements that are summed in fp32 at a time: enough for any device, 1 MiB of scratch."""


class Wire(Protocol):
    """Sums a bucket over ranks."""

    @property
    def is_staged(self) -> bool:
        """Whether something is left to do, or memory to free, when the first collective is done."""
        ...

    def stages(self, full: Tensor, shard: Tensor) -> Iterator[Pending]:
        """Writes `shard` (n,), a view of `full` or not: this rank's part of the sum of `full` (size * n,)."""
        ...


@dataclass(frozen=True, slots=True)
class SumEverywhere:
    """An all-reduce in one instance, then over the others: every rank has the sum of all of it."""

    comm: Comm
    across: Comm  # a world of one where there is one instance

    @property
    def is_staged(self) -> bool:
        """Only with several instances."""
        return self.across.size > 1

    def stages(self, full: Tensor, shard: Tensor) -> Iterator[Pending]:
        """Writes `full`."""
        yield self.comm.all_reduce_(full, async_op=True)
        if self.is_staged:
            yield self.across.all_reduce_(full, async_op=True)


@dataclass(frozen=True, slots=True)
class SumToShards:
    """A reduce-scatter in one instance of the optimizer, then an all-reduce of the shard over the other instances."""

    comm: Comm
    across: Comm  # a world of one where there is one instance

    @property
    def is_staged(self) -> bool:
        """Only with several instances."""
        return self.across.size > 1

    def stages(self, full: Tensor, shard: Tensor) -> Iterator[Pending]:
        """Writes `shard`; what is left in the rest of `full` is undefined."""
        yield self.comm.reduce_scatter_(shard, full, async_op=True)
        if self.is_staged:
            yield self.across.all_reduce_(shard, async_op=True)


@dataclass(frozen=True, slots=True)
class SumInFp32:
    """Parts travel in the gradients' own dtype, are summed in fp32 in rank order, and rounded once."""

    comm: Comm
    is_staged: ClassVar[bool] = True

    def stages(self, full: Tensor, shard: Tensor) -> Iterator[Pending]:
        """Writes `shard`; holds a second bucket until the end of its only stage."""
        received = torch.empty_like(full)
        yield self.comm.all_to_all_(received, full, async_op=True)
        parts = received.view(self.comm.size, shard.numel())
        for start in range(0, shard.numel(), SUM_TILE_NUMEL):
            first, *others = parts[:, start : start + SUM_TILE_NUMEL]
            total = first.to(torch.float32)
            for part in others:
                total.add_(part)
            shard[start : start + SUM_TILE_NUMEL].copy_(total)


def sum_over(axes: Axes, *, num_shards: int) -> Wire:
    """The plain sum over all replicas: to shards where a buffer has several, else everywhere."""
    if num_shards > 1:
        return SumToShards(axes.dp, axes.inter)
    return SumEverywhere(axes.dp, axes.inter)


_HOST = Host()


class CollectiveError(RuntimeError):
    """A collective that did not complete: a peer died, raised, or never came to it."""


class InFlight:
    """The stages of one bucket, under way.

    On a CPU the host waits for each stage before it starts the next, in `advance` or `finish`. On an asynchronous
    device, a recipe of several stages is queued to the side stream at once, and only `finish` makes the current stream
    wait for it: neither the host nor compute waits between two stages.
    """

    def __init__(self, stages: Iterator[Pending], what: str, *, device: Device = _HOST, is_staged: bool = False):
        self._stages = stages
        self._what = what
        self._device = device
        self._done: Event | None = None  # of all stages
        self._pending: Pending | None = None
        if device.is_asynchronous and is_staged:
            self._queue_all()
        else:
            self._pending = self._next()

    def advance(self) -> None:
        """Waits for the present stage and starts the next; nothing where all are done or queued.

        Raises:
            CollectiveError: it failed, or ran into the group's timeout.
        """
        if self._pending is None:
            return
        try:
            self._pending.wait()
        except Exception as error:
            raise CollectiveError(f"{self._what}: {error}") from error
        self._pending = self._next()

    def finish(self) -> None:
        """Waits for all stages; on an asynchronous device it is the current stream that waits."""
        while self._pending is not None:
            self.advance()
        if self._done is not None:
            self._device.current_stream().wait_event(self._done)
            self._done = None

    def _queue_all(self) -> None:
        side = self._device.side_stream()
        side.wait_event(self._device.current_stream().record_event())
        with self._device.on(side):
            self._pending = self._next()
            while self._pending is not None:
                self.advance()
        self._done = side.record_event()

    @torch.no_grad()
    def _next(self) -> Pending | None:
        try:
            return next(self._stages, None)
        except Exception as error:
            raise CollectiveError(f"{self._what}: {error}") from error
