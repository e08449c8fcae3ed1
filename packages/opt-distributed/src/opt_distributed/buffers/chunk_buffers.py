"""The buffers of one model chunk: planned, allocated, and compared between replicas."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor, nn

from opt_config import DistributedDataParallelConfig
from opt_distributed.buffers.agreement import Facts, agree_on, check_config
from opt_distributed.buffers.apart import check_apart
from opt_distributed.buffers.binding import check_unbound
from opt_distributed.buffers.bucket import Reduction
from opt_distributed.buffers.fp8_memory import check_gathered_in_fp8
from opt_distributed.buffers.grouping import BufferPlan, IsWhole, NumShards, plan_buffers
from opt_distributed.buffers.local_sums import LocalSums, local_sums
from opt_distributed.buffers.storage import ParamAndGradBuffer
from opt_distributed.buffers.wire import SumInFp32, Wire, sum_over
from opt_distributed.comm.groups import Axes, Roles
from opt_distributed.comm.user_buffers import UserBuffers, user_buffers
from opt_paramgroups import ParamId, ParamMeta


class ChunkBuffer(NamedTuple):
    """One buffer of a chunk."""

    plan: BufferPlan
    memory: ParamAndGradBuffer
    reduction: Reduction
    sums: LocalSums


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSpec:
    """Everything that determines how the gradients and parameters of a chunk are stored and reduced."""

    config: DistributedDataParallelConfig
    params: Mapping[ParamId, nn.Parameter]
    metas: Mapping[ParamId, ParamMeta]
    others: Sequence[tuple[str, Tensor]]  # frozen parameters, and buffers of the module, with their names
    roles: Roles
    is_whole: IsWhole
    shard_multiple: int
    calculate_per_token_loss: bool


def make_buffers(spec: ChunkSpec) -> tuple[ChunkBuffer, ...]:
    """Create the buffers of a chunk. Collective: an error on one rank, or a difference, is raised on every rank.

    Raises:
        LayoutError, StorageError, ValueError: see `DistributedDataParallel`.
    """
    buffers: tuple[ChunkBuffer, ...] = ()
    pools: dict[_PoolKey, UserBuffers | None] = {}
    error = None
    try:
        check_config(spec.config, spec.roles, per_token=spec.calculate_per_token_loss)
        check_unbound(spec.params)
        check_apart(spec.params, spec.others)
        check_gathered_in_fp8(spec.config, spec.metas)
        planned = _plans(spec)
        pools = _make_pools(spec, planned) if spec.config.nccl_ub else {}
        buffers = tuple(_make_buffer(spec, plan, pools.get(_pool_key(spec, plan))) for plan in planned)
        for pool in filter(None, pools.values()):
            pool.check()
    except Exception as caught:  # of any kind, out of memory included: the other ranks wait for the verdict
        error = caught
    plans = [buffer.plan for buffer in buffers]
    families = ((spec.roles.dense, False), (spec.roles.expert, True))
    facts = [Facts(axes, _facts(spec, plans, is_expert=is_expert)) for axes, is_expert in families]
    agree_on(facts, error, peers=(spec.roles.dense.tp, spec.roles.expert.tp))
    for pool in filter(None, pools.values()):
        pool.register()
    return buffers


def _facts(spec: ChunkSpec, plans: Sequence[BufferPlan], *, is_expert: bool) -> dict[str, str]:
    """Values that must be equal on all replicas of a family: configuration, kind of loss, order and layouts."""
    facts = {field.name: repr(getattr(spec.config, field.name)) for field in fields(spec.config)}
    facts["calculate_per_token_loss"] = repr(spec.calculate_per_token_loss)
    layouts = {str(plan.key): plan.layout.fingerprint()[:16] for plan in plans if plan.key.is_expert == is_expert}
    facts["order of buffers"] = ", ".join(layouts)
    return facts | {f"layout of {key}": fingerprint for key, fingerprint in layouts.items()}


def _plans(spec: ChunkSpec) -> tuple[BufferPlan, ...]:
    return plan_buffers(
        spec.metas,
        spec.config,
        num_shards=NumShards(dense=spec.roles.dense.dp.size, expert=spec.roles.expert.dp.size),
        num_ranks=spec.roles.dense.num_replicas,
        is_whole=spec.is_whole,
        shard_multiple=spec.shard_multiple,
    )


class _PoolKey(NamedTuple):
    """The buffers that one pool of NCCL memory holds."""

    is_expert: bool
    device: str


def _pool_key(spec: ChunkSpec, plan: BufferPlan) -> _PoolKey:
    return _PoolKey(plan.key.is_expert, str(_device(spec, plan)))


def _make_pools(spec: ChunkSpec, plans: Sequence[BufferPlan]) -> dict[_PoolKey, UserBuffers | None]:
    """One pool for each family and device, dense ones first: registering is collective."""
    pools: dict[_PoolKey, UserBuffers | None] = {}
    symmetric = not spec.config.disable_symmetric_registration
    for key, plan in sorted({_pool_key(spec, plan): plan for plan in plans}.items(), key=lambda item: item[0]):
        axes = _axes(spec, plan)
        pools[key] = user_buffers((axes.dp, axes.inter), device=_device(spec, plan), symmetric=symmetric)
    return pools


def _device(spec: ChunkSpec, plan: BufferPlan) -> torch.device:
    return spec.params[plan.params[0].id].device


def _make_buffer(spec: ChunkSpec, plan: BufferPlan, pool: UserBuffers | None) -> ChunkBuffer:
    params = {shape.id: spec.params[shape.id] for shape in plan.params}
    device = _device(spec, plan)
    memory = ParamAndGradBuffer(
        plan.layout,
        params,
        param_dtype=plan.key.param_dtype,
        grad_dtype=plan.key.grad_dtype,
        device=device,
        sharded=spec.config.use_distributed_optimizer,
        allocate=_axes(spec, plan).dp.allocate if pool is None else pool,
        reuses_grads=spec.config.reuse_grad_buf_for_mxfp8_param_ag,
    )
    patterns = spec.config.param_name_patterns_for_fp32_local_accumulation
    sums = local_sums(plan.params, patterns, grad_dtype=plan.key.grad_dtype, device=device)
    return ChunkBuffer(plan, memory, _reduction(spec, plan), sums)


def _axes(spec: ChunkSpec, plan: BufferPlan) -> Axes:
    return spec.roles.expert if plan.key.is_expert else spec.roles.dense


def _reduction(spec: ChunkSpec, plan: BufferPlan) -> Reduction:
    config = spec.config
    axes = _axes(spec, plan)
    mean = 1.0 if spec.calculate_per_token_loss else 1.0 / spec.roles.dense.num_replicas
    return Reduction(
        name=f"{plan.key}",
        wire=_wire(config, plan, axes),
        axes=axes,
        is_expert=plan.key.is_expert,
        scale_before=1.0 if config.average_in_collective else mean,
        scale_after=mean if config.average_in_collective else 1.0,
        check_for_nan=config.check_for_nan_in_grad,
        check_for_large=config.check_for_large_grads,
    )


def _wire(config: DistributedDataParallelConfig, plan: BufferPlan, axes: Axes) -> Wire:
    if config.reduce_scatter_with_fp32_accumulation:
        return SumInFp32(axes.dp)
    return sum_over(axes, num_shards=plan.layout.num_shards)
