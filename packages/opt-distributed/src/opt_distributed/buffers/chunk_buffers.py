"""The buffers of one model chunk: planned, allocated, and compared between replicas before their first collective.

`SyncedBuffer` is one of them as a `Source` of the step.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from opt_config import DistributedDataParallelConfig, FlatShards, OptimizerConfig, Replicated, Sharding, WholeParams
from opt_distributed.buffers.bucket import Reduction
from opt_distributed.buffers.gathered import GatheredParams
from opt_distributed.buffers.grad_sync import GradSync
from opt_distributed.buffers.param_wires import Fp8ThroughGrads, check_gathered_in_fp8
from opt_distributed.buffers.planner import BufferPlan, WorldSizes, default_bucket_size, plan_buffers
from opt_distributed.buffers.storage import LocalSums, ParamAndGradBuffer
from opt_distributed.buffers.stored import check_apart, check_unbound
from opt_distributed.buffers.wires import wire_of
from opt_distributed.comm.collectives import Alone, Comm, agree
from opt_distributed.comm.roles import Axes, Roles, from_all_replicas
from opt_distributed.comm.user_buffers import UserBuffers
from opt_distributed.layout import LayoutError, Piece
from opt_paramgroups import Metas, ParamId, ParamMeta, Params


class SyncedBuffer:
    """One buffer of a wrapped chunk: a `Source` whose gradients are means already.

    A parameter without a gradient has zeros in the buffer, on every rank. `attach` connects it to the reductions and
    gathers of its chunk.
    """

    grad_scale = 1.0

    def __init__(self, plan: BufferPlan, memory: ParamAndGradBuffer, reduction: Reduction, sums: LocalSums):
        self.plan = plan
        self.memory = memory
        self.params = memory.params
        self.reduction = reduction
        self.sums = sums
        self.axes = reduction.axes

    def attach(self, finish: Callable[[], None], grad_sync: GradSync, place: GatheredParams) -> None:
        """Let the step reduce and publish the buffer with the others of its chunk. `finish` completes the chunk's
        reductions."""
        self._finish = finish
        self._grad_sync = grad_sync
        self.place = place

    def reduce_(self) -> None:
        """Complete the reduction of all gradients of the chunk. A second call in an iteration does nothing."""
        self._finish()

    def reader(self, runs: Sequence[tuple[ParamId, slice]]) -> Callable[[], Sequence[Tensor]]:
        """Create a function that returns `grad` of these runs: the same views in every step."""
        views = [self.grad(id, of_param) for id, of_param in runs]
        return lambda: views

    def grad(self, id: ParamId, of_param: slice) -> Tensor:
        """The reduced gradient of these flat elements, which this rank must own; in the parameter's shape if whole."""
        return self.memory.grad_piece(id, of_param)

    @property
    def through_grads(self) -> Fp8ThroughGrads | None:
        """The wire of parameters that are gathered through the gradients' memory; None if they are not."""
        return self.memory.wire if isinstance(self.memory.wire, Fp8ThroughGrads) else None

    def lend_grad_storage_(self) -> None:
        """Lend the gradients' memory to the parameters, until the next iteration.

        Raises:
            GradientError: gradients have been added since the last step.
        """
        for bucket in self._grad_sync.buckets:
            if bucket.memory is self.memory:
                bucket.lend_storage_()

    def owned(self) -> Iterator[Piece]:
        """The pieces whose reduced gradients this rank has: its own, or all after a reduction on every rank."""
        layout = self.plan.layout
        if self.memory.reduces_everywhere:
            for slot in layout.slots():
                whole = slice(0, slot.numel)
                yield Piece(slot.id, of_param=whole, of_shard=whole)
        else:
            for _, piece in layout.owned(self.axes.dp.rank):
                yield piece

    def published_with(self, buffers: Sequence["SyncedBuffer"]) -> "SyncedBuffer":
        """Return this buffer for a step that publishes only `buffers` of the chunk.

        Gathers of dense buffers do not wait for experts: replicas without experts would start them earlier than others.
        """
        found = copy(self)
        together = {other.memory for other in buffers if other.plan.is_expert == self.plan.is_expert}
        found.place = GatheredParams(self.memory, self.place.sync, together)
        return found


def agree_on(families: Sequence[tuple[Axes, Mapping[str, str]]], error: Exception | None, everyone: Comm) -> None:
    """Raise on all ranks of the model if one of them has an error, or facts differ between replicas.

    `families`: for dense parameters and for experts, the values that must be equal on all replicas, by name.

    Raises:
        LayoutError: quotes the error of another rank, or says what differs on which ranks. If this rank has an error,
            that is raised instead.
    """
    try:
        agree(everyone, error)
        for axes, facts in families:
            per_rank: list[dict[str, str]] = from_all_replicas(axes, dict(facts))
            first = per_rank[0]
            different = [rank for rank, other in enumerate(per_rank) if other != first]
            if different and error is None:
                other = per_rank[different[0]]
                name = next(name for name in (*first, *other) if first.get(name) != other.get(name))
                error = LayoutError(
                    f"data-parallel ranks {different} laid their buffers out differently from rank 0; model and "
                    f"configuration must be equal on all ranks that share parameters; {name} is "
                    f"{first.get(name, 'missing')} on rank 0 and {other.get(name, 'missing')} on rank {different[0]}"
                )
        agree(everyone, error)
    except ValueError as refusal:
        if refusal is error:
            raise
        raise LayoutError(str(refusal)) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSpec:
    """Everything that determines how the gradients and parameters of a chunk are stored and reduced."""

    config: DistributedDataParallelConfig
    params: Params
    metas: Metas
    others: Sequence[tuple[str, Tensor]]  # frozen parameters, and buffers of the module, with their names
    roles: Roles
    chunk: int  # its number
    sharding: Sharding
    calculate_per_token_loss: bool


def sharding_of(config: DistributedDataParallelConfig, optimizer_config: OptimizerConfig | None) -> Sharding:
    """Return how the chunk is sharded: as the optimizer's configuration says, or flat if there is none."""
    if not config.use_distributed_optimizer:
        return Replicated()
    if optimizer_config is not None and not isinstance(optimizer_config.sharding, Replicated):
        return optimizer_config.sharding
    return FlatShards(overlap_gather=config.overlap_param_gather, overlap_gather_with_step=False)


def make_buffers(spec: ChunkSpec) -> tuple[SyncedBuffer, ...]:
    """Create the buffers of a chunk. Collective: an error on one rank, or a difference, is raised on every rank.

    Raises:
        LayoutError, StorageError, ValueError: see `DistributedDataParallel`.
    """
    config = spec.config
    buffers: list[SyncedBuffer] = []
    pools: dict[tuple[bool, str], UserBuffers] = {}
    error = None
    try:
        _check_config(spec)
        check_unbound(spec.params)
        check_apart(spec.params, spec.others)
        check_gathered_in_fp8(config, spec.metas)
        planned = _plans(spec)
        # With `nccl_ub`, one pool for each family and device, dense ones first: registering is collective.
        for is_expert, name in sorted({_place(spec, plan) for plan in planned}) if config.nccl_ub else ():
            axes = _axes(spec, is_expert)
            groups = [comm for comm in (axes.dp, axes.inter) if not isinstance(comm, Alone)]
            if groups:
                symmetric = not config.disable_symmetric_registration
                pools[is_expert, name] = UserBuffers(groups, device=torch.device(name), symmetric=symmetric)
        for plan in planned:
            buffers.append(_make_buffer(spec, plan, pools.get(_place(spec, plan))))
        for pool in pools.values():
            pool.check()
    except Exception as caught:  # of any kind, out of memory included: the other ranks wait for the verdict
        error = caught
    facts = {field.name: repr(getattr(config, field.name)) for field in fields(config)}
    facts["calculate_per_token_loss"] = repr(spec.calculate_per_token_loss)
    families = []
    for is_expert in (False, True):
        of_family = dict(facts)
        plans = [buffer.plan for buffer in buffers if buffer.plan.is_expert == is_expert]
        of_family["order of buffers"] = ", ".join(plan.name for plan in plans)
        for plan in plans:
            of_family[f"layout of {plan.name}"] = plan.layout.fingerprint()[:16]
        families.append((_axes(spec, is_expert), of_family))
    agree_on(families, error, spec.roles.everyone)
    for pool in pools.values():
        pool.register()
    return tuple(buffers)


def _check_config(spec: ChunkSpec) -> None:
    """Raise ValueError if a field of the configuration contradicts another one, the groups, or the loss."""
    config = spec.config
    instances = spec.roles.dense.inter.size
    config.validate()  # fields may have been assigned since it was built
    if config.num_distributed_optimizer_instances != instances:
        raise ValueError(
            f"num_distributed_optimizer_instances={config.num_distributed_optimizer_instances}, but the groups make up "
            f"{instances}; pass an inter_dist_opt group of that size"
        )
    if config.average_in_collective and spec.calculate_per_token_loss:
        raise ValueError(
            "average_in_collective=True averages, calculate_per_token_loss=True sums; set one of them to False"
        )


def _plans(spec: ChunkSpec) -> tuple[BufferPlan, ...]:
    """Plan the buffers. Without overlap, every buffer has one bucket."""
    for meta in spec.metas.values():
        if meta.is_dtensor:
            raise LayoutError(
                f"{meta.id} is a DTensor, laid out already; leave the model unwrapped, the step takes it as is"
            )
    config = spec.config
    keeps_whole = isinstance(spec.sharding, WholeParams)

    def grad_dtype(meta: ParamMeta) -> torch.dtype:
        return torch.float32 if config.grad_reduce_in_fp32 else meta.dtype

    def bucket_size(numel: int) -> int | None:
        if not (config.overlap_grad_reduce or config.overlap_param_gather):
            return None
        if config.num_buckets is not None:
            return max(-(-numel // config.num_buckets), 1)
        return config.bucket_size or default_bucket_size(spec.roles.dense.num_replicas)

    return plan_buffers(
        spec.metas,
        sharding=spec.sharding,
        sizes=WorldSizes.of(spec.roles),
        needs_whole=lambda meta: keeps_whole and meta.moved_as_matrix,
        grad_dtype=grad_dtype,
        bucket_size=bucket_size,
        pad_for_high_busbw=config.pad_buckets_for_high_nccl_busbw,
        chunk=spec.chunk,
    )


def _place(spec: ChunkSpec, plan: BufferPlan) -> tuple[bool, str]:
    """Whether a buffer has experts, and the name of its device."""
    return plan.is_expert, str(spec.params[plan.params[0].id].device)


def _axes(spec: ChunkSpec, is_expert: bool) -> Axes:
    return spec.roles.expert if is_expert else spec.roles.dense


def _make_buffer(spec: ChunkSpec, plan: BufferPlan, pool: UserBuffers | None) -> SyncedBuffer:
    config = spec.config
    axes = _axes(spec, plan.is_expert)
    params = {shape.id: spec.params[shape.id] for shape in plan.params}
    device = next(iter(params.values())).device
    memory = ParamAndGradBuffer(
        plan.layout,
        params,
        param_dtype=plan.dtype,
        grad_dtype=plan.grad_dtype,
        device=device,
        sharded=plan.kind.is_sharded,
        allocate=axes.dp.allocate if pool is None else pool,
        reuses_grads=config.reuse_grad_buf_for_mxfp8_param_ag,
    )
    mean = 1.0 if spec.calculate_per_token_loss else 1.0 / spec.roles.dense.num_replicas
    averages = config.average_in_collective
    reduction = Reduction(
        name=plan.name,
        wire=wire_of(config, axes, num_shards=plan.layout.num_shards),
        axes=axes,
        is_expert=plan.is_expert,
        scale_before=1.0 if averages else mean,
        scale_after=mean if averages else 1.0,
        check_for_nan=config.check_for_nan_in_grad,
        check_for_large=config.check_for_large_grads,
    )
    patterns = config.param_name_patterns_for_fp32_local_accumulation
    sums = LocalSums(plan.params, patterns, grad_dtype=plan.grad_dtype, device=device)
    return SyncedBuffer(plan, memory, reduction, sums)
