"""Decide which pieces of parameters live on the host: by element counts, from the plan alone, equally on all ranks."""

from collections.abc import Iterable, Mapping, Sequence
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
    return {
        buffer.name: tuple(_first(_sizes(buffer, shard, metas), placement.fraction) for shard in _shards(buffer))
        for buffer in buffers
    }


def _shards(buffer: BufferPlan) -> Iterable[int]:
    return range(1 if buffer.spread is Spread.LAID_OUT else buffer.layout.num_shards)


def _sizes(buffer: BufferPlan, shard: int, metas: Mapping[ParamId, ParamMeta]) -> list[tuple[ParamId, int]]:
    """Return the pieces of a shard with their numbers of elements."""
    if buffer.spread is Spread.LAID_OUT:
        return [(param.id, prod(metas[param.id].shape)) for param in buffer.params]
    return [(run.id, run.numel) for run in buffer.runs(shard)]


def _first(sizes: Sequence[tuple[ParamId, int]], fraction: float) -> frozenset[ParamId]:
    wanted = fraction * sum(numel for _, numel in sizes)
    chosen: list[ParamId] = []
    reached = 0
    for id, numel in sizes:
        if reached >= wanted:
            break
        chosen.append(id)
        reached += numel
    return frozenset(chosen)
