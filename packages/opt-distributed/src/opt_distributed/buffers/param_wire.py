"""How a bucket's parameters travel from the ranks that own shards of them to all ranks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from opt_distributed.comm.collectives import Comm, Pending
from opt_distributed.layout import Layout


class ParamWire(Protocol):
    """Completes the parameters of a bucket: a recipe of stages for `InFlight`, as `wire.Wire` is for gradients."""

    @property
    def is_staged(self) -> bool:
        """Whether something is left to do when the first collective is done."""
        ...

    def stages(self, index: int, comm: Comm) -> Iterator[Pending]:
        """Writes the parameters of bucket `index`: every rank's shard."""
        ...


@dataclass(frozen=True, slots=True)
class GatherInPlace:
    """An all-gather in the buffer that the parameters themselves lie in."""

    layout: Layout
    data: Tensor  # (layout.numel,)
    is_staged: ClassVar[bool] = False

    def stages(self, index: int, comm: Comm) -> Iterator[Pending]:
        """Writes `data`."""
        yield gather_part(self.layout, self.data, index, comm)


def gather_part(layout: Layout, data: Tensor, index: int, comm: Comm, *, per: int = 1) -> Pending:
    """Starts the all-gather of bucket `index` of `data`, which has one element for each `per` of the layout's."""
    bucket = layout.buckets[index]
    shard = bucket.shard(comm.rank if layout.num_shards > 1 else 0, layout.num_shards)
    full = data[bucket.start // per : bucket.stop // per]
    return comm.all_gather_(full, data[shard.start // per : shard.stop // per], async_op=True)
