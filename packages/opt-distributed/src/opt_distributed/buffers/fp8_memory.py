"""fp8 parameters in a buffer: gathers send one byte per element, and scales if these belong to runs of elements."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from opt_config import DistributedDataParallelConfig
from opt_distributed.buffers.param_wire import gather_part
from opt_distributed.buffers.stored import StorageError
from opt_distributed.comm.allocate import Allocate
from opt_distributed.comm.collectives import Comm, Pending
from opt_distributed.layout import Layout
from opt_kernels.quantized import QuantizedParam, quantized
from opt_paramgroups import ParamId, ParamMeta


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
    layout: Layout, params: Mapping[ParamId, nn.Parameter], *, device: torch.device, allocate: Allocate
) -> Fp8Memory:
    """Move the codes of `params` into a buffer.

    Raises:
        StorageError: parameters have several recipes, or the layout cuts runs that share a scale.
    """
    found = {id: q for id, param in params.items() if (q := quantized(param)) is not None}
    recipes = {q.recipe.name: q.recipe for q in found.values()}
    if len(recipes) > 1:
        raise StorageError(f"fp8 parameters have the recipes {', '.join(recipes)}; use one for all of them")
    run = next((recipe.run for recipe in recipes.values()), 0)
    _check_runs(layout, run)
    codes = allocate(layout.numel, dtype=torch.uint8, device=device)
    scales = allocate(layout.numel // run, dtype=torch.uint8, device=device) if run else None
    for slot in layout.slots():
        at = None if scales is None else scales[slot.start // run : slot.stop // run]
        found[slot.id].move_(codes[slot.start : slot.stop], at)
    return Fp8Memory(layout=layout, params=found, codes=codes, scales=scales, run=run)


def check_gathered_in_fp8(config: DistributedDataParallelConfig, metas: Mapping[ParamId, ParamMeta]) -> None:
    """Raise StorageError if a wrapper shards fp8 parameters without fp8_param_gather."""
    stored = [id for id, meta in metas.items() if meta.codes is not None]
    if stored and config.use_distributed_optimizer and not config.fp8_param_gather:
        raise StorageError(
            f"{stored[0]} (and {len(stored) - 1} more) is stored in fp8, but fp8_param_gather=False; set it to True: "
            "parameters that are sharded in fp8 are gathered in fp8"
        )


def _check_runs(layout: Layout, run: int) -> None:
    """Check that cuts are multiples of `run`, counted from the buffer's start and from that of each parameter."""
    chunks = (bucket.chunk_bounds(layout.num_shards) for bucket in layout.buckets)
    starts = (*(at for bounds in chunks for at in bounds[:2]), *(slot.start for slot in layout.slots()))
    if run and any(start % run for start in starts):
        raise StorageError(
            f"the layout cuts runs of {run} elements that share a scale; pass DistributedDataParallel a "
            f"shard_multiple that is a multiple of {run}"
        )
