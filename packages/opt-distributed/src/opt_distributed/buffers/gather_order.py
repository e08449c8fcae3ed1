"""`align_param_gather`: gathers that a pipeline's schedule starts, in one order on all ranks.

Megatron-Core's schedules call `start_param_sync` of a chunk at the same time on all pipeline stages, so that no stage
waits for another one that is slowed by a gather. The first request, by a schedule, a read of a parameter or a
reduction, starts the pending gathers of all chunks up to the requested one, in ascending order of the chunks. All
replicas start each gather once in each step, before they reduce gradients again. So their collectives match although
requests come at different times.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol


class Gathering(Protocol):
    """The part of a chunk's `ParamSync` that the order uses."""

    number: int  # of the chunk
    gather_order: "GatherOrder"

    @property
    def is_due(self) -> bool:
        """Whether shards have been written whose gathers have not started."""
        ...

    def start_due(self) -> None:
        """Start these gathers."""
        ...


class GatherOrder:
    """The gathers of the chunks of one model."""

    def __init__(self, chunks: Sequence[Gathering]):
        self.chunks = tuple(sorted(chunks, key=lambda chunk: chunk.number))

    def start_through(self, last: Gathering) -> None:
        """Start the pending gathers of all chunks up to `last`."""
        for chunk in self.chunks[: self.chunks.index(last) + 1]:
            chunk.start_due()

    def start_all(self) -> None:
        """Start the pending gathers of all chunks."""
        for chunk in self.chunks:
            if chunk.is_due:
                chunk.start_due()


def share_gather_order(chunks: Iterable[Gathering]) -> None:
    """Give one order of gathers to `chunks` and to all chunks that share an order with one of them."""
    linked = {id(other): other for chunk in chunks for other in chunk.gather_order.chunks}
    order = GatherOrder(list(linked.values()))
    for chunk in order.chunks:
        chunk.gather_order = order
