"""`ParamWire`: how the parameters of a bucket are sent from the ranks that own shards of them to all ranks.

In place, as codes and scales (`Fp8Memory`), or through the gradient buffer (`Fp8ThroughGrads`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from opt_config import DistributedDataParallelConfig
from opt_distributed.buffers.stored import StorageError
from opt_distributed.comm.collectives import Allocate, Comm, Pending, Sizes
from opt_distributed.layout import Layout
from opt_kernels.quantized import QuantizedParam
from opt_paramgroups import Metas, ParamId


class ParamWire(Protocol):
    """Completes the parameters of a bucket in stages, which `InFlight` runs; for gradients there is `wires.Wire`."""

    @property
    def is_staged(self) -> bool:
        """Whether work is left after the first collective."""

    def stages(self, index: int, comm: Comm) -> Iterator[Pending]:
        """Write the parameters of bucket `index`: the shards of all ranks."""


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
    bucket = layout.buckets[index]
    size = layout.num_shards
    rank = comm.rank
    full = data[bucket.start // per : bucket.stop // per]
    shard = bucket.shard(rank, size)
    part = data[shard.start // per : shard.stop // per]
    if bucket.cuts:
        sent = [numel // per for numel in bucket.of_shard(rank, size)]
        received = [numel // per for numel in bucket.of_chunk(rank, size)]
        chunk = full.new_zeros(full.numel() // size)  # padding is zero
        comm.all_to_all_(chunk[: sum(received)], part, sizes=Sizes(received, sent), async_op=True).wait()
        part = chunk
    return _Gather(comm.all_gather_(full, part, async_op=True), part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Memory:
    """The codes of a buffer's parameters, which use it as their memory; a `ParamWire`.

    Every rank computes scales of whole tensors and of square blocks from the largest magnitudes over all ranks, which
    the step reduces before. Only scales of runs are gathered here.
    """

    layout: Layout
    params: Mapping[ParamId, QuantizedParam]
    codes: Tensor  # (layout.numel,) uint8
    scales: Tensor | None  # (layout.numel / run,) uint8
    run: int
    is_staged: ClassVar[bool] = True

    def stages(self, index: int, comm: Comm) -> Iterator[Pending]:
        """Writes `codes` and `scales`.

        Both gathers start at once. One that started in `InFlight.finish` would start when this rank first reads a
        parameter of the bucket, in an order that may differ between ranks.
        """
        gathers = [gather_part(self.layout, self.codes, index, comm)]
        if self.scales is not None:
            gathers.append(gather_part(self.layout, self.scales, index, comm, per=self.run))
        yield from gathers
        for slot in self.layout.buckets[index].slots:
            self.params[slot.id].finish_()


def move_fp8_in(
    layout: Layout, params: Mapping[ParamId, QuantizedParam], *, device: torch.device, allocate: Allocate
) -> Fp8Memory:
    """Move the codes of `params` into a buffer.

    Raises:
        StorageError: parameters have several recipes, or the layout cuts runs that share a scale.
    """
    recipes = {param.recipe.name: param.recipe for param in params.values()}
    if len(recipes) > 1:
        raise StorageError(f"fp8 parameters have the recipes {', '.join(recipes)}; use one for all of them")
    run = next((recipe.run for recipe in recipes.values()), 0)
    chunks = (bucket.chunk_bounds(layout.num_shards) for bucket in layout.buckets)
    starts = (*(at for bounds in chunks for at in bounds[:2]), *(slot.start for slot in layout.slots()))
    if run and any(start % run for start in starts):  # counted from the buffer's start, and from that of each parameter
        raise StorageError(
            f"the layout cuts runs of {run} elements that share a scale; make it with a "
            f"shard_multiple that is a multiple of {run}"
        )
    codes = allocate(layout.numel, dtype=torch.uint8, device=device)
    scales = allocate(layout.numel // run, dtype=torch.uint8, device=device) if run else None
    for slot in layout.slots():
        at = None if scales is None else scales[slot.start // run : slot.stop // run]
        params[slot.id].move_(codes[slot.start : slot.stop], at)
    return Fp8Memory(layout=layout, params=params, codes=codes, scales=scales, run=run)


def check_gathered_in_fp8(config: DistributedDataParallelConfig, metas: Metas) -> None:
    """Raise StorageError if a wrapper shards fp8 parameters without fp8_param_gather."""
    stored = [id for id, meta in metas.items() if meta.codes is not None]
    if stored and config.use_distributed_optimizer and not config.fp8_param_gather:
        raise StorageError(
            f"{stored[0]} (and {len(stored) - 1} more) is stored in fp8, but fp8_param_gather=False; set it to True: "
            "parameters that are sharded in fp8 are gathered in fp8"
        )


@dataclass(slots=True, kw_only=True)
class Fp8ThroughGrads:
    """The gradients' memory, for parameters that keep their own; a `ParamWire`.

    `stage_` fills it; `stages` gathers one bucket of it, once after each `stage_`.

    Raises:
        StorageError: a parameter has a recipe other than mxfp8.
    """

    layout: Layout
    params: Mapping[ParamId, QuantizedParam]
    grad_data: Tensor  # (layout.numel,), two bytes an element or more
    is_staged: ClassVar[bool] = True
    _filled: set[int] = field(default_factory=set)  # buckets that have not been gathered since `stage_`

    def __post_init__(self) -> None:
        other = next((param.recipe.name for param in self.params.values() if param.recipe.name != "mxfp8"), None)
        if other is not None:
            raise StorageError(
                f"reuse_grad_buf_for_mxfp8_param_ag=True, but fp8 parameters have the recipe {other!r}; set it to False"
            )

    @property
    def values(self) -> Tensor:
        """(layout.numel,) bf16: the first bytes of the gradients."""
        return self.grad_data.view(torch.bfloat16)[: self.layout.numel]

    def stage_(self, mains: Mapping[ParamId, tuple[int, Tensor]]) -> None:
        """Write this rank's main values over the gradients. `mains`: by parameter, its first element and values."""
        starts = {slot.id: slot.start for slot in self.layout.slots()}
        values = self.values
        for id, (first, main) in mains.items():
            at = starts[id] + first
            values[at : at + main.numel()].copy_(main.reshape(-1))
        self._filled = set(range(len(self.layout.buckets)))

    def stages(self, index: int, comm: Comm) -> Iterator[Pending]:
        """Write the parameters of a bucket, then zeros over their values. Does nothing if it was gathered already."""
        if index not in self._filled:
            return
        self._filled.discard(index)
        values = self.values
        yield gather_part(self.layout, values, index, comm)
        bucket = self.layout.buckets[index]
        for slot in bucket.slots:
            param = self.params[slot.id]
            param.quantize_(values[slot.start : slot.stop].view(param.shape))
            param.finish_()
        values[bucket.start : bucket.stop].zero_()
