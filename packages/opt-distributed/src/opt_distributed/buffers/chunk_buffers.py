"""The buffers of one model chunk: planned, allocated, and compared between replicas before their first collective.

`SyncedBuffer` is one of them as a `Source` of the step.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from opt_config import DistributedDataParallelConfig, Sharding, WholeParams
from opt_distributed.buffers.bucket import Reduction
from opt_distributed.buffers.param_wires import Fp8ThroughGrads, check_gathered_in_fp8
from opt_distributed.buffers.planner import BufferPlan, WorldSizes, plan_buffers, wrapped_bucket_size
from opt_distributed.buffers.storage import LocalSums, ParamAndGradBuffer, local_sums
from opt_distributed.buffers.stored import check_apart, check_unbound
from opt_distributed.buffers.wires import wire_kind
from opt_distributed.comm.collectives import Comm
from opt_distributed.comm.groups import Axes, Roles, from_all_replicas
from opt_distributed.comm.user_buffers import UserBuffers, user_buffers
from opt_distributed.layout import LayoutError, Piece
from opt_paramgroups import ParamId, ParamMeta


def check_config(config: DistributedDataParallelConfig, roles: Roles, *, per_token: bool) -> None:
    """Check a configuration alone, and against the process groups and the kind of loss.

    Raises:
        ValueError: a field contradicts another one, the groups, or the loss.
    """
    config.validate()  # fields may have been assigned since it was built
    instances = roles.dense.inter.size
    if config.num_distributed_optimizer_instances != instances:
        raise ValueError(
            f"num_distributed_optimizer_instances={config.num_distributed_optimizer_instances}, but the groups make up "
            f"{instances}; pass an inter_dist_opt group of that size"
        )
    if config.average_in_collective and per_token:
        raise ValueError(
            "average_in_collective=True averages, calculate_per_token_loss=True sums; set one of them to False"
        )


class Facts(NamedTuple):
    """Values that must be equal on all replicas of one family of parameters."""

    axes: Axes
    by_name: Mapping[str, str]


class _Report(NamedTuple):
    """What one rank reports to the others."""

    error: str | None  # of this rank
    forwarded: str | None  # the refusal of another family's replicas
    by_name: Mapping[str, str]


def agree_on(facts: Sequence[Facts], error: Exception | None, *, peers: Sequence[Comm] = ()) -> None:
    """Raise on all ranks that are connected through `facts` or `peers` if one of them has an error, or facts differ.

    Every rank forwards refusals before it raises, so that no rank waits for one that has raised.

    Raises:
        LayoutError: quotes the error of another rank, or says what differs on which ranks. If this rank has an error,
            that is raised instead.
    """
    own = None if error is None else str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    refusal: str | None = None
    for axes, by_name in facts:
        reports = from_all_replicas(axes, _Report(own, refusal, dict(by_name)))
        refusal = refusal or _refusal(reports)
    for comm in peers:
        refusals = comm.gather_objects(refusal)
        refusal = refusal or next((one for one in refusals if one is not None), None)
    if error is not None:
        raise error
    if refusal is not None:
        raise LayoutError(refusal)


def _refusal(reports: Sequence[_Report]) -> str | None:
    for rank, report in enumerate(reports):
        if report.error is not None:
            return f"data-parallel rank {rank} refused: {report.error}"
    forwarded = next((report.forwarded for report in reports if report.forwarded is not None), None)
    if forwarded is not None:
        return forwarded
    first = reports[0].by_name
    different = [rank for rank, report in enumerate(reports) if report.by_name != first]
    if not different:
        return None
    difference = first_difference(first, reports[different[0]].by_name, rank=different[0])
    return (
        f"data-parallel ranks {different} laid their buffers out differently from rank 0; model and configuration must "
        f"be equal on all ranks that share parameters; {difference}"
    )


def first_difference(first: Mapping[str, Any], other: Mapping[str, Any], *, rank: int) -> str:
    """Describe the first entry in which the facts of rank 0 and of `rank` differ; they must differ."""
    name = next(name for name in (*first, *other) if first.get(name) != other.get(name))
    return f"{name} is {first.get(name, 'missing')} on rank 0 and {other.get(name, 'missing')} on rank {rank}"


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
    chunk: int  # its number
    sharding: Sharding
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
    layouts = {plan.name: plan.layout.fingerprint()[:16] for plan in plans if plan.is_expert == is_expert}
    facts["order of buffers"] = ", ".join(layouts)
    return facts | {f"layout of {key}": fingerprint for key, fingerprint in layouts.items()}


def _plans(spec: ChunkSpec) -> tuple[BufferPlan, ...]:
    """Plan the buffers. Without overlap, every buffer has one bucket."""
    for meta in spec.metas.values():
        if meta.is_dtensor:
            raise LayoutError(
                f"{meta.id} is a DTensor, laid out already; leave the model unwrapped, the step takes it as is"
            )
    config, num_ranks = spec.config, spec.roles.dense.num_replicas
    return plan_buffers(
        spec.metas,
        sharding=spec.sharding,
        sizes=WorldSizes.of(spec.roles),
        needs_whole=lambda meta: isinstance(spec.sharding, WholeParams) and meta.moved_as_matrix,
        grad_dtype=lambda meta: torch.float32 if config.grad_reduce_in_fp32 else meta.dtype,
        bucket_size=lambda numel: wrapped_bucket_size(config, numel=numel, num_ranks=num_ranks),
        pad_for_high_busbw=config.pad_buckets_for_high_nccl_busbw,
        chunk=spec.chunk,
    )


class _PoolKey(NamedTuple):
    """The buffers that one pool of NCCL memory holds."""

    is_expert: bool
    device: str


def _pool_key(spec: ChunkSpec, plan: BufferPlan) -> _PoolKey:
    return _PoolKey(plan.is_expert, str(_device(spec, plan)))


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
        param_dtype=plan.dtype,
        grad_dtype=plan.grad_dtype,
        device=device,
        sharded=plan.kind.is_sharded,
        allocate=_axes(spec, plan).dp.allocate if pool is None else pool,
        reuses_grads=spec.config.reuse_grad_buf_for_mxfp8_param_ag,
    )
    patterns = spec.config.param_name_patterns_for_fp32_local_accumulation
    sums = local_sums(plan.params, patterns, grad_dtype=plan.grad_dtype, device=device)
    return ChunkBuffer(plan, memory, _reduction(spec, plan), sums)


def _axes(spec: ChunkSpec, plan: BufferPlan) -> Axes:
    return spec.roles.expert if plan.is_expert else spec.roles.dense


def _reduction(spec: ChunkSpec, plan: BufferPlan) -> Reduction:
    config = spec.config
    axes = _axes(spec, plan)
    mean = 1.0 if spec.calculate_per_token_loss else 1.0 / spec.roles.dense.num_replicas
    return Reduction(
        name=plan.name,
        wire=wire_kind(config, num_shards=plan.layout.num_shards).make(axes),
        axes=axes,
        is_expert=plan.is_expert,
        scale_before=1.0 if config.average_in_collective else mean,
        scale_after=mean if config.average_in_collective else 1.0,
        check_for_nan=config.check_for_nan_in_grad,
        check_for_large=config.check_for_large_grads,
    )


class Chunk(Protocol):
    """The part of the wrapper that its buffers use."""

    def finish_grad_sync(self) -> None: ...

    def lend_grads(self, memory: ParamAndGradBuffer) -> None: ...

    def publish(self, memory: ParamAndGradBuffer, *, together: Sequence[ParamAndGradBuffer]) -> None: ...


class SyncedBuffer:
    """One buffer of a wrapped chunk: a `Source` whose gradients are means already.

    A parameter without a gradient has zeros in the buffer, on every rank.
    """

    grad_scale = 1.0

    def __init__(
        self,
        plan: BufferPlan,
        memory: ParamAndGradBuffer,
        axes: Axes,
        chunk: Chunk,
        together: Sequence[ParamAndGradBuffer],  # the buffers that a step publishes, including this one
    ):
        self.plan, self.memory, self.axes = plan, memory, axes
        self._chunk = chunk
        self._together = together

    @property
    def params(self) -> Mapping[ParamId, nn.Parameter]:
        """The parameters of the buffer."""
        return self.memory.params

    def reduce_(self) -> None:
        """Complete the reduction of all gradients of the chunk. A second call in an iteration does nothing."""
        self._chunk.finish_grad_sync()

    def moved(self) -> ParamId | None:
        """A parameter that has left the buffer; None if all are in it."""
        return self.memory.moved()

    def reader(self, runs: Sequence[tuple[ParamId, slice]]) -> Callable[[], Sequence[Tensor]]:
        """Create a function that returns `grad` of these runs: the same views in every step."""
        views = [self.grad(id, of_param) for id, of_param in runs]
        return lambda: views

    def grad(self, id: ParamId, of_param: slice) -> Tensor:
        """The reduced gradient of these flat elements, which this rank must own; in the parameter's shape if whole."""
        return self.memory.grad_piece(id, of_param)

    def publish_(self) -> None:
        """Report that this rank's parameters have been written. Gathers start with the last buffer of the step."""
        if self.memory.wire is not None:
            self._chunk.publish(self.memory, together=self._together)

    @property
    def through_grads(self) -> Fp8ThroughGrads | None:
        """The wire of parameters that are gathered through the gradients' memory; None if they are not."""
        return self.memory.wire if isinstance(self.memory.wire, Fp8ThroughGrads) else None

    def lend_grads_(self) -> None:
        """Lend the gradients' memory to the parameters, until the next iteration.

        Raises:
            GradientError: gradients have been added since the last step.
        """
        self._chunk.lend_grads(self.memory)

    def owned(self) -> Iterator[Piece]:
        """The pieces whose reduced gradients this rank has: its own, or all after a reduction on every rank."""
        layout = self.plan.layout
        if self.memory.reduces_everywhere:
            wholes = ((slot.id, slice(0, slot.numel)) for slot in layout.slots())
            return (Piece(id, of_param=whole, of_shard=whole) for id, whole in wholes)
        rank = self.axes.dp.rank if layout.num_shards > 1 else 0
        return (owned.piece for owned in layout.owned(rank))

    def published_with(self, buffers: Sequence["SyncedBuffer"]) -> "SyncedBuffer":
        """Return this buffer for a step that publishes only `buffers` of the chunk.

        Gathers of dense buffers do not wait for experts: replicas without experts would start them earlier than others.
        """
        together = [one.memory for one in buffers if one.plan.is_expert == self.plan.is_expert]
        return SyncedBuffer(self.plan, self.memory, self.axes, self._chunk, together)

    def results(self) -> Iterator[Tensor]:
        """This rank's part of the reduced gradients: a view for each bucket."""
        for index in range(len(self.plan.layout.buckets)):
            yield self.memory.result(index, self.axes.dp.rank)
