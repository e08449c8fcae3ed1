"""Reduction in the step of gradients that autograd left in `param.grad`: to this rank's shards, or on every rank."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

import torch
from torch import Tensor, nn

from opt_distributed.buffers.storage import ParamAndGradBuffer
from opt_distributed.buffers.wire import CollectiveError, InFlight, SumToShards, to_owners
from opt_distributed.comm import device as devices
from opt_distributed.comm.groups import Axes
from opt_distributed.layout import Layout
from opt_paramgroups import ParamId

Grads = Mapping[ParamId, Tensor | None]
"""The gradient of every parameter on this rank; None stands for zeros."""


class ReducedGrads(Protocol):
    """Memory of the sums over all replicas, which are valid until the next reduction."""

    def reduce_(self, grads: Grads) -> None:
        """Compute the sums of these gradients, which are only read.

        Raises:
            CollectiveError: a collective failed, or exceeded the timeout of its group.
        """
        ...

    def piece(self, id: ParamId, of_param: slice) -> Tensor:
        """The sum for these flat elements of a parameter, which this rank owns; in its shape if they are all of it.

        A view, which shows the result of every reduction.
        """
        ...


class GradsEverywhere:
    """All sums on every rank, reduced in place."""

    def __init__(self, memory: ParamAndGradBuffer, axes: Axes):
        self.memory, self.axes = memory, axes
        self._places = {id: memory.grad_view(id) for id in memory.params}

    def reduce_(self, grads: Grads) -> None:
        _fill_(self._places, grads)
        self.memory.reduce_(self.axes)

    def piece(self, id: ParamId, of_param: slice) -> Tensor:
        return self.memory.grad_piece(id, of_param)


NUM_SCRATCH = 2
"""Scratch buckets: one is filled while another is being reduced."""


class GradShards:
    """This rank's shard of every bucket, and, during a reduction, at most `NUM_SCRATCH` buckets of gradients."""

    def __init__(
        self,
        layout: Layout,
        params: Mapping[ParamId, nn.Parameter],
        *,
        dtype: torch.dtype,
        device: torch.device,
        axes: Axes,
    ):
        self.layout, self.axes = layout, axes
        shards = [bucket.shard(axes.dp.rank, layout.num_shards) for bucket in layout.buckets]
        numels = [shard.stop - shard.start for shard in shards]
        self.shards = torch.zeros(sum(numels), dtype=dtype, device=device)
        self._shard_of: Sequence[Tensor] = torch.split(self.shards, numels)  # by bucket
        largest = max((bucket.numel for bucket in layout.buckets), default=0)
        self._scratch = [
            torch.zeros(largest, dtype=dtype, device=device) for _ in range(min(NUM_SCRATCH, len(layout.buckets)))
        ]
        self._places = [
            {slot.id: self._place(index, slot.start - bucket.start, params[slot.id]) for slot in bucket.slots}
            for index, bucket in enumerate(layout.buckets)
        ]
        self._pieces = {piece.id: self._shard_of[at][piece.of_shard] for at, piece in layout.owned(axes.dp.rank)}
        self._shapes = {id: param.shape for id, param in params.items()}
        self._queues = devices.device_of(device)
        for scratch in self._scratch:
            self._queues.release_(scratch)

    def reduce_(self, grads: Grads) -> None:
        with self._scratch_memory(), _all_finished() as flights:
            for index, places in enumerate(self._places):
                if index >= len(self._scratch):
                    flights.popleft().finish()  # of the bucket that used this scratch before
                _fill_(places, grads)
                flights.append(self._start(index))

    def piece(self, id: ParamId, of_param: slice) -> Tensor:
        shape = self._shapes[id]
        return self._pieces[id].view(shape) if of_param == slice(0, shape.numel()) else self._pieces[id]

    def _start(self, index: int) -> InFlight:
        bucket = self.layout.buckets[index]
        wire = to_owners(SumToShards(self.axes.dp, self.axes.inter), bucket, self.axes.dp)
        stages = wire.stages(self._bucket(index)[: bucket.numel], self._shard_of[index])
        return InFlight(stages, f"gradient bucket {index}", device=self._queues, is_staged=wire.is_staged)

    @contextmanager
    def _scratch_memory(self) -> Iterator[None]:
        """Allocate the scratch buckets inside, with zeros, so that padding is zero."""
        for scratch in self._scratch:
            self._queues.take_back_(scratch)
            scratch.zero_()
        try:
            yield
        finally:
            for scratch in self._scratch:
                self._queues.release_(scratch)

    def _bucket(self, index: int) -> Tensor:
        """The scratch memory in which a bucket is filled and reduced."""
        return self._scratch[index % len(self._scratch)]

    def _place(self, index: int, start: int, param: nn.Parameter) -> Tensor:
        return self._bucket(index)[start : start + param.numel()].view(param.shape)


@contextmanager
def _all_finished() -> Iterator[deque[InFlight]]:
    """Wait at the end for all reductions in the deque, even if one fails: afterwards their memory is freed."""
    flights: deque[InFlight] = deque()
    try:
        yield flights
        while flights:
            flights.popleft().finish()
    finally:
        for flight in flights:
            with suppress(CollectiveError):
                flight.finish()


def _fill_(places: Mapping[ParamId, Tensor], grads: Grads) -> None:
    """Write the gradients to `places`, and zeros where a gradient is None."""
    there = [id for id in places if grads[id] is not None]
    for id in places.keys() - there:
        places[id].zero_()
    if there:
        torch._foreach_copy_([places[id] for id in there], [grad for id in there if (grad := grads[id]) is not None])
