"""Reductions in the step of gradients that autograd left in `param.grad`, and sums that complete a gradient.

`ReducedGrads` reduces over replicas, to this rank's shards or on every rank. `sum_over_peers_` sums over peers: ranks
with other parts of the same model.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from opt_config import DistributedDataParallelConfig
from opt_distributed.buffers.main_grad import UnusableGradientError
from opt_distributed.buffers.stored import ParamTensors
from opt_distributed.buffers.wires import CollectiveError, InFlight, to_owners, wire_of
from opt_distributed.comm import device as devices
from opt_distributed.comm.collectives import ALONE, Comm, sum_together_
from opt_distributed.comm.roles import Axes, marks_set
from opt_distributed.layout import Layout
from opt_paramgroups import ParamId, ParamMeta, Params

Grads = Mapping[ParamId, Tensor | None]
"""The gradient of every parameter on this rank; None stands for zeros."""

NUM_SCRATCH = 2
"""Scratch buckets: one is filled while another is being reduced."""


class ReducedGrads:
    """The sums over all replicas that this rank needs, which are valid until the next reduction.

    If ranks own shards, that is its shard of every bucket, and buckets borrow their memory during a reduction from a
    ring of `NUM_SCRATCH`. Otherwise it is every bucket, which is reduced in place.
    """

    def __init__(
        self,
        layout: Layout,
        params: Params,
        axes: Axes,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.layout = layout
        self.axes = axes
        numels = [bucket.numel for bucket in layout.buckets]
        self._scratch: list[Tensor] = []
        if layout.num_shards > 1:
            shards = [bucket.shard(axes.dp.rank, layout.num_shards) for bucket in layout.buckets]
            shard_numels = [shard.stop - shard.start for shard in shards]
            self.sums = torch.zeros(sum(shard_numels), dtype=dtype, device=device)
            self._results: Sequence[Tensor] = torch.split(self.sums, shard_numels)
            for _ in numels[:NUM_SCRATCH]:
                self._scratch.append(torch.zeros(max(numels), dtype=dtype, device=device))
            self._buckets = [self._scratch[at % NUM_SCRATCH][:numel] for at, numel in enumerate(numels)]
        else:
            self.sums = axes.dp.allocate(layout.numel, dtype=dtype, device=device)
            self._results = self._buckets = list(torch.split(self.sums, numels))
        self._places: list[dict[ParamId, Tensor]] = []
        for full, bucket in zip(self._buckets, layout.buckets, strict=True):
            places = {}
            for slot in bucket.slots:
                flat = full[slot.start - bucket.start : slot.stop - bucket.start]
                places[slot.id] = flat.view(params[slot.id].shape)
            self._places.append(places)
        # Of the parameters that this rank owns a part of, flat unless it is all: views, of every reduction's result.
        self.pieces: dict[ParamId, Tensor] = {}
        for at, piece in layout.owned(axes.dp.rank):
            shape = params[piece.id].shape
            flat = self._results[at][piece.of_shard]
            self.pieces[piece.id] = flat.view(shape) if piece.numel == shape.numel() else flat
        self._wire = wire_of(DistributedDataParallelConfig(), axes, num_shards=layout.num_shards)
        self._queues = devices.device_of(device)
        for scratch in self._scratch:
            self._queues.release_(scratch)

    @torch.no_grad()
    def reduce_(self, grads: Grads) -> None:
        """Compute the sums of these gradients, which are only read.

        Raises:
            CollectiveError: a collective failed, or exceeded the timeout of its group.
            UnusableGradientError: a gradient could not be read. The reduction is complete, with zeros in its place.
        """
        unreadable: Exception | None = None
        flights: deque[InFlight] = deque()
        for scratch in self._scratch:
            self._queues.reclaim_(scratch)
            scratch.zero_()  # padding is zero
        try:
            for index, places in enumerate(self._places):
                if self._scratch and index >= len(self._scratch):
                    flights.popleft().finish()  # of the bucket that used this scratch before
                try:
                    _fill_(places, grads)
                except Exception as error:  # of any kind, because the other ranks wait
                    unreadable = error
                    _fill_(places, dict.fromkeys(places))
                wire = to_owners(self._wire, self.layout.buckets[index], self.axes.dp)
                stages = wire.stages(self._buckets[index], self._results[index])
                what = f"gradient bucket {index}"
                flights.append(InFlight(stages, what, device=self._queues, is_staged=wire.is_staged))
            while flights:
                flights.popleft().finish()
        finally:
            for flight in flights:  # after an error, before their memory is freed
                with suppress(CollectiveError):
                    flight.finish()
            for scratch in self._scratch:
                self._queues.release_(scratch)
        if unreadable is not None:
            raise UnusableGradientError(f"a gradient could not be read: {unreadable}") from unreadable


def _fill_(places: ParamTensors, grads: Grads) -> None:
    """Copy gradients to their places in a bucket, and zeros for those that are missing."""
    targets = []
    found = []
    for id, place in places.items():
        grad = grads[id]
        if grad is None:
            place.zero_()
        else:
            targets.append(place)
            found.append(grad)
    if found:
        torch._foreach_copy_(targets, found)


class Part(NamedTuple):
    """A part of a gradient, which peers hold for their copies of the parameter."""

    meta: ParamMeta
    value: Tensor  # contiguous, updated


def sum_over_peers_(parts: Iterable[Part], peers: Mapping[str, Comm], *, qk_layernorm: bool) -> None:
    """Replace parts of gradients by their sums or means over `peers`, which are groups by role.

    Collective; all peers pass equal parts, in order. Writes the parts of marked parameters: sums of `pipeline_parallel`
    ones over stages, and over the chunks of a stage; sums of `sequence_parallel` ones over tensor-parallel ranks, or
    means of `average_gradients_across_tp_domain` ones, which takes precedence, as in Megatron-Core; sums of tied
    embeddings and position embeddings over their stages.

    Raises:
        CollectiveError: a sum failed, or exceeded the timeout of its group.
    """
    # Stages may hold copies in another order, because the other parameters of a stage decide on its layout.
    of_model = list(parts)
    by_shape = sorted(of_model, key=lambda part: (part.meta.shape, part.meta.id.name))
    copies: dict[str, list[Tensor]] = {}
    for meta, value in of_model:
        if meta.pipeline_parallel:
            copies.setdefault(meta.id.name, []).append(value)
    try:
        for first, *others in copies.values():
            for other in others:
                first.add_(other)
        sum_together_([copies[name][0] for name in sorted(copies)], peers.get("pp", ALONE))
        for first, *others in copies.values():
            for other in others:
                other.copy_(first)
        roles = [dict(marks_set(meta, qk_layernorm=qk_layernorm)).values() for meta, _ in of_model]
        for role in ("tp", "expt_tp"):
            comm = peers.get(role, ALONE)
            marked = [part for part, of_part in zip(of_model, roles, strict=True) if role in of_part]
            sum_together_([value for meta, value in marked if not meta.average_gradients_across_tp], comm)
            averaged = [value for meta, value in marked if meta.average_gradients_across_tp]
            sum_together_(averaged, comm, scale=1.0 / comm.size)
        for meta, value in by_shape:
            if meta.shared_embedding:
                peers.get("embd", ALONE).all_reduce_(value)
        positions = [value for meta, value in by_shape if meta.shared_position_embedding]
        sum_together_(positions, peers.get("pos_embd", ALONE))
    except Exception as error:  # whatever a backend raises when a peer is gone
        raise CollectiveError(f"sum of gradients over tensor-parallel ranks and stages: {error}") from error
