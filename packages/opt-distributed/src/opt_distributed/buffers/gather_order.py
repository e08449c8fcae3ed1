"""Gathers that a pipeline's schedule starts, in one order on all ranks: `align_param_gather`.

Megatron-Core's schedules call `start_param_sync` of a chunk at the same time on all pipeline stages, so that no stage
waits for another whose forward runs beside a gather. Whoever asks first, a schedule, a read of a parameter or a
reduction, starts what is due of all chunks up to the one asked for, in ascending order of the chunks. All replicas
start each gather once for each step, before they reduce gradients again, so that their collectives match although
they ask at different times.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol


class Gathering(Protocol):
    """What the order knows of one chunk's `ParamSync`."""

    number: int  # of the chunk
    gather_order: "GatherOrder"

    @property
    def is_due(self) -> bool:
        """Whether shards have been written whose gathers have not begun."""
        ...

    def start_due(self) -> None:
        """Starts these gathers."""
        ...


class GatherOrder:
    """The gathers of the chunks of one model."""

    def __init__(self, chunks: Sequence[Gathering]):
        self.chunks = tuple(sorted(chunks, key=lambda chunk: chunk.number))

    def start_through(self, last: Gathering) -> None:
        """Starts what is due of all chunks up to `last`."""
        for chunk in self.chunks[: self.chunks.index(last) + 1]:
            chunk.start_due()

    def start_all(self) -> None:
        """Starts what is due of any chunk."""
        for chunk in self.chunks:
            if chunk.is_due:
                chunk.start_due()


def share_gather_order(chunks: Iterable[Gathering]) -> None:
    """Gives chunks, and all that share an order with one of them, one order of gathers."""
    linked = {id(other): other for chunk in chunks for other in chunk.gather_order.chunks}
    order = GatherOrder(list(linked.values()))
    for chunk in order.chunks:
        chunk.gather_order = order
