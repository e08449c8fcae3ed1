"""Decide which pieces of parameters live on the host: by element counts, from the plan alone, equally on all ranks."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod

from opt_config import OnDevice, Placement
from opt_paramgroups import ParamId, ParamMeta
from opt_stack.planning.plan import BufferPlan, Hosted, Spread


def plan_host(
    placement: Placement, buffers: Sequence[BufferPlan], metas: Mapping[ParamId, ParamMeta]
) -> Mapping[str, Hosted]:
    """Return, by buffer name, the parameters whose pieces live on the host: one set for each shard.

    Each shard keeps its first pieces on the host, in the order of the layout, until they hold the fraction of its
    elements: at most one piece too many, as in Megatron-Core. DTensors are counted by their whole shapes, because ranks
    that store parts of one matrix must make the same decision.
    """
    if isinstance(placement, OnDevice):
        return {}
    return {buffer.name: tuple(_hosted(buffer, metas, placement.fraction)) for buffer in buffers}


def _hosted(buffer: BufferPlan, metas: Mapping[ParamId, ParamMeta], fraction: float) -> Iterator[frozenset[ParamId]]:
    """Yield the parameters of each shard whose pieces live on the host."""
    is_laid_out = buffer.spread is Spread.LAID_OUT
    for shard in range(1 if is_laid_out else buffer.layout.num_shards):
        runs = [(run.id, prod(metas[run.id].shape) if is_laid_out else run.numel) for run in buffer.runs(shard)]
        wanted = fraction * sum(numel for _, numel in runs)
        before = accumulate((numel for _, numel in runs), initial=0)
        yield frozenset(id for (id, _), reached in zip(runs, before) if reached < wanted)
