"""Collectives that take time and write late: rank 0 of two ranks, on a clock that is only a number."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from data_parallel_net import bucket_of, shard_of
from torch import Tensor

from opt_distributed.buffers import DistributedDataParallel
from opt_distributed.comm import Alone, Op
from opt_distributed.comm.collectives import Pending

DELAY = 1.0  # of a collective; it takes no longer than the compute of its bucket


@dataclass(slots=True)
class Timeline:
    """The time, and what happened when."""

    now: float = 0.0
    events: list[str] = field(default_factory=list)

    def compute(self, what: str, duration: float) -> None:
        self.now += duration
        self.events.append(what)

    def issued(self, kind: str) -> list[int]:
        """Positions of the events of a kind."""
        return [index for index, event in enumerate(self.events) if event.startswith(kind)]


@dataclass(slots=True)
class Late:
    """A collective that is done, and that writes, only later."""

    timeline: Timeline
    done_at: float
    write: Callable[[], object]
    written: bool = False

    def wait(self) -> None:
        self.timeline.now = max(self.timeline.now, self.done_at)
        if not self.written:
            self.written = True
            self.write()


class DelayedComm(Alone):
    """Rank 0 of two, whose peer always holds the same; collectives run one after another and each takes `DELAY`."""

    size = 2

    def __init__(self, timeline: Timeline):
        self.timeline = timeline
        self.free_at = 0.0

    def __deepcopy__(self, memo: dict[int, Any]) -> "DelayedComm":
        raise TypeError("process groups cannot be copied")

    def _later(self, kind: str, write: Callable[[], object], async_op: bool) -> Pending:
        self.timeline.events.append(kind)
        self.free_at = max(self.timeline.now, self.free_at) + DELAY
        late = Late(self.timeline, self.free_at, write)
        if not async_op:
            late.wait()
        return late

    def all_reduce_(self, x: Tensor, *, op: Op = Op.SUM, async_op: bool = False) -> Pending:
        return self._later("all_reduce", lambda: x.mul_(2 if op is Op.SUM else 1), async_op)

    def reduce_scatter_(self, shard: Tensor, full: Tensor, *, async_op: bool = False) -> Pending:
        return self._later("reduce_scatter", lambda: shard.mul_(2), async_op)

    def all_gather_(self, full: Tensor, shard: Tensor, *, async_op: bool = False) -> Pending:
        return self._later("all_gather", lambda: full.copy_(shard.repeat(2)), async_op)

    def all_to_all_(self, out: Tensor, x: Tensor, *, async_op: bool = False) -> Pending:
        return self._later("all_to_all", lambda: out.copy_(x[: x.numel() // 2].repeat(2)), async_op)

    def gather_objects(self, value: Any) -> list[Any]:
        return [value, value]


def publish(ddp: DistributedDataParallel, value: float) -> None:
    """Write and publish this rank's shards, as a step does. The other half is NaN until it is awaited."""
    for buffer in ddp.synced_buffers:
        for index in range(len(buffer.plan.layout.buckets)):
            bucket_of(buffer.memory, index).fill_(float("nan"))
            shard_of(buffer.memory, index, 0).fill_(value)
        buffer.place.publish_()
