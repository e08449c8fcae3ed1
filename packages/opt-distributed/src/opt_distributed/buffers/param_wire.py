"""`ParamWire`: how the parameters of a bucket are sent from the ranks that own shards of them to all ranks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from opt_distributed.comm.collectives import Comm, Pending
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
    """An in-place all-gather in the memory of the parameters."""

    layout: Layout
    data: Tensor  # (layout.numel,)
    is_staged: ClassVar[bool] = False

    def stages(self, index: int, comm: Comm) -> Iterator[Pending]:
        """Writes `data`."""
        yield gather_part(self.layout, self.data, index, comm)


def gather_part(layout: Layout, data: Tensor, index: int, comm: Comm, *, per: int = 1) -> Pending:
    """Start the all-gather of bucket `index` in `data`, which has one element for each `per` elements of the layout."""
    bucket = layout.buckets[index]
    shard = bucket.shard(comm.rank if layout.num_shards > 1 else 0, layout.num_shards)
    full = data[bucket.start // per : bucket.stop // per]
    return comm.all_gather_(full, data[shard.start // per : shard.stop // per], async_op=True)
