"""`ParamWire`: how the parameters of a bucket are sent from the ranks that own shards of them to all ranks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from torch import Tensor

from opt_distributed.comm.collectives import Comm, Pending, Sizes
from opt_distributed.layout import Layout


class ParamWire(Protocol):
    """Completes the parameters of a bucket in stages, which `InFlight` runs; for gradients there is `wire.Wire`."""

    @property
    def is_staged(self) -> bool:
        """Whether work is left after the first collective."""
        ...

    def stages(self, index: int, comm: Comm) -> Iterator[Pending]:
        """Write the parameters of bucket `index`: the shards of all ranks."""
        ...


@dataclass(frozen=True, slots=True)
class GatherInPlace:
    """An all-gather in the memory of the parameters."""

    layout: Layout
    data: Tensor  # (layout.numel,)
    is_staged: ClassVar[bool] = False

    def stages(self, index: int, comm: Comm) -> Iterator[Pending]:
        """Writes `data`."""
        yield gather_part(self.layout, self.data, index, comm)


class _Gather(NamedTuple):
    """A gather, and the memory that it reads."""

    pending: Pending
    read: Tensor

    def wait(self) -> None:
        self.pending.wait()


def gather_part(layout: Layout, data: Tensor, index: int, comm: Comm, *, per: int = 1) -> Pending:
    """Start the all-gather of bucket `index` in `data`, which has one element for each `per` elements of the layout.

    Shards of unequal size are exchanged for equal chunks first. The host waits for this on a CPU: if the gather started
    later, where this rank first reads a parameter of the bucket, its order might differ between ranks.
    """
    bucket, size = layout.buckets[index], layout.num_shards
    rank = comm.rank if size > 1 else 0
    full = data[bucket.start // per : bucket.stop // per]
    shard = bucket.shard(rank, size)
    part = data[shard.start // per : shard.stop // per]
    if bucket.cuts:
        sent, received = ([n // per for n in ns] for ns in (bucket.of_shard(rank, size), bucket.of_chunk(rank, size)))
        chunk = full.new_zeros(full.numel() // size)  # padding is zero
        comm.all_to_all_(chunk[: sum(received)], part, sizes=Sizes(received, sent), async_op=True).wait()
        part = chunk
    return _Gather(comm.all_gather_(full, part, async_op=True), part)
