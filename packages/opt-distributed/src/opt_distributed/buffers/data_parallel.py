"""`DistributedDataParallel`: a model chunk over contiguous buffers whose collectives overlap with compute."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple, Self
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from opt_config import DistributedDataParallelConfig
from opt_distributed.buffers.agreement import Facts, agree_on, check_config
from opt_distributed.buffers.binding import (
    adopt_main_grad_,
    begin_accumulation,
    bind_main_grad,
    check_unbound,
    take_grad_,
)
from opt_distributed.buffers.bucket import GradBucket, Travel
from opt_distributed.buffers.grad_sync import GradSync, Reduces
from opt_distributed.buffers.grouping import (
    BufferPlan,
    IsWhole,
    NumShards,
    nothing_whole,
    plan_buffers,
)
from opt_distributed.buffers.launch_order import share_order
from opt_distributed.buffers.param_reads import UseHooks
from opt_distributed.buffers.param_sync import Gathers, ParamBucket, ParamSync
from opt_distributed.buffers.replicas import broadcast_replicas_
from opt_distributed.buffers.storage import ParamAndGradBuffer
from opt_distributed.buffers.wire import SumInFp32, Wire, sum_over
from opt_distributed.comm.find import Given, find_roles
from opt_distributed.comm.groups import Axes
from opt_distributed.layout import Piece
from opt_distributed.layout.padding import SHARD_MULTIPLE
from opt_paramgroups import ParamId, ParamMeta, describe
from opt_paramgroups.names import parameters_by_id


class _Buffers(NamedTuple):
    plans: tuple[BufferPlan, ...]
    memories: tuple[ParamAndGradBuffer, ...]


class SyncedBuffer:
    """One buffer of a wrapped chunk, as the step meets it: a `Source` whose gradients are means already."""

    grad_scale = 1.0
    doubtful: Sequence[ParamId] = ()  # a parameter without a gradient has zeros in the buffer, on every rank

    def __init__(
        self,
        plan: BufferPlan,
        memory: ParamAndGradBuffer,
        axes: Axes,
        chunk: "DistributedDataParallel",
        together: Sequence[ParamAndGradBuffer],  # the buffers that are published in one step, this one among them
    ):
        self.plan, self.memory, self.axes = plan, memory, axes
        self._chunk = chunk
        self._together = together

    @property
    def params(self) -> Mapping[ParamId, nn.Parameter]:
        """The parameters that live here."""
        return self.memory.params

    def reduce_(self) -> None:
        """Completes the reduction of the whole chunk's gradients; a second call in an iteration changes nothing."""
        self._chunk.finish_grad_sync()

    def flags(self) -> Tensor:
        """(0,) float64."""
        return torch.empty(0, dtype=torch.float64)

    def settle_(self, flags: Tensor) -> None:
        """Nothing is in doubt."""

    def unused(self) -> Collection[ParamId]:
        """None: zeros are a gradient too."""
        return ()

    def moved(self) -> ParamId | None:
        """A parameter that has left the buffer; None if none has."""
        return self.memory.moved()

    def reader(self, id: ParamId, of_param: slice) -> Callable[[], Tensor]:
        """Reads what `grad` gives, at every step anew: the same view."""
        view = self.grad(id, of_param)
        return lambda: view

    def grad(self, id: ParamId, of_param: slice) -> Tensor:
        """The reduced gradient of these flat elements, which this rank must own; whole parameters in their shape."""
        return self.memory.grad_piece(id, of_param)

    def publish_(self) -> None:
        """Reports that this rank's parameters have been written; gathers start with the last buffer of the step."""
        if self.memory.param_data is not None:
            self._chunk.publish(self.memory, together=self._together)

    def owned(self) -> Iterator[Piece]:
        """What this rank owns of the parameters; all of them where the buffer is replicated."""
        layout = self.plan.layout
        rank = self.axes.dp.rank if layout.num_shards > 1 else 0
        return (owned.piece for owned in layout.owned(rank))

    def published_with(self, buffers: Sequence["SyncedBuffer"]) -> "SyncedBuffer":
        """The same buffer for a step that publishes `buffers` and no others of the chunk.

        Dense buffers do not wait for experts: a replica without experts would start their gathers earlier than others.
        """
        together = [one.memory for one in buffers if one.plan.key.is_expert == self.plan.key.is_expert]
        return SyncedBuffer(self.plan, self.memory, self.axes, self._chunk, together)

    def results(self) -> Iterator[Tensor]:
        """What this rank holds of the reduced gradients: a view for each bucket."""
        for index in range(len(self.plan.layout.buckets)):
            yield self.memory.result(index, self.axes.dp.rank)


def share_launch_order(chunks: Sequence["DistributedDataParallel"]) -> None:
    """Lets the reductions of several chunks overlap with their backward passes although they share process groups.

    The chunks' iterations must begin and end together: all backward passes run before the first `finish_grad_sync`.
    `get_optimizer` calls this for its chunks.

    Raises:
        ValueError: two chunks have the same number.
    """
    if chunks:
        share_order([chunk.grad_sync for chunk in chunks])


class DistributedDataParallel(nn.Module):
    """Wraps one model chunk: gradients accumulate in `param.main_grad`, in buffers that are reduced bucket by bucket.

    One iteration::

        for microbatch in microbatches[:-1]:
            with ddp.no_sync():
                loss(ddp(microbatch)).backward()
        loss(ddp(last)).backward()      # with overlap_grad_reduce, buckets are reduced while this runs
        optimizer.step()                # finishes the reduction, updates, publishes
        optimizer.zero_grad()           # or ddp.zero_grad_buffer(), or both

    After the reduction, this rank's part of a gradient is the mean over the dense replicas: for dense parameters and
    for experts, whose gradients a smaller group sums. With `calculate_per_token_loss` it is the sum, and the caller
    divides by the number of tokens (`scale_gradients`, `finalize_model_grads`). Where state is sharded, other parts
    of `main_grad` are undefined after the reduction. A tensor that the caller binds to `param.main_grad` replaces the
    gradient, at the next backward pass or reduction; it must have the parameter's shape.

    Args:
        config: read, never written.
        module: the chunk. Its parameters move into the buffers: wrap it when it is on its device, in its dtype.
        groups: process groups by role (`ProcessGroups`, Megatron-Core's own collection, or ready `Roles`). None: as for
            `opt_stack.get_optimizer`: all ranks are replicas, unless parameters say otherwise.
        mesh: a `DeviceMesh` over the whole world in place of `groups`.
        broadcast_params: replicas take the first one's weights, as by the method of that name. False: they keep their
            own; `opt_stack.get_optimizer` compares them, and refuses replicas that differ.
        is_whole: which parameters sharding must not cut, such as `matrices_whole` for Muon.
        calculate_per_token_loss: losses are sums over tokens.
        chunk: the number of the chunk in a virtual pipeline.
        shard_multiple: elements that every cut of a parameter is a multiple of; the block size, where a codec keeps
            optimizer state in blocks.

    Raises:
        LayoutError, StorageError: on every rank, where one rank's parameters cannot be laid out (a DTensor is,
            already), or are in another wrapper's buffers, or ranks' layouts or configurations differ.
    """

    def __init__(
        self,
        config: DistributedDataParallelConfig,
        module: nn.Module,
        *,
        groups: Given = None,
        mesh: DeviceMesh | None = None,
        broadcast_params: bool = False,
        is_whole: IsWhole = nothing_whole,
        calculate_per_token_loss: bool = False,
        chunk: int = 0,
        shard_multiple: int = SHARD_MULTIPLE,
    ):
        super().__init__()
        self.config = config
        self.module = module
        self.calculate_per_token_loss = calculate_per_token_loss
        self.shard_multiple = shard_multiple
        self.roles = find_roles([module], groups, mesh=mesh, sharded=False)
        self._params = parameters_by_id([module], model_chunk_offset=chunk)
        self.metas: Mapping[ParamId, ParamMeta] = describe([module], model_chunk_offset=chunk)
        plans, memories = self._agreed_buffers(is_whole, shard_multiple)
        if broadcast_params:
            broadcast_replicas_(self._params, self.metas, self.roles)
        travels = [self._travel(plan) for plan in plans]
        buckets = [(number, index) for number, plan in enumerate(plans) for index in range(len(plan.layout.buckets))]
        overlaps = config.overlap_grad_reduce or config.overlap_param_gather
        self.grad_sync = GradSync(
            [GradBucket(memories[number], index, travels[number]) for number, index in buckets],
            reduces=Reduces.IN_BACKWARD if config.overlap_grad_reduce else Reduces.IN_STEP,
            learns=overlaps,
            number=chunk,
        )
        self._param_sync = ParamSync(
            [
                ParamBucket(memories[number], index, travels[number].axes.dp)
                for number, index in buckets
                if config.use_distributed_optimizer
            ],
            gathers=Gathers.BEFORE_USE if config.overlap_param_gather else Gathers.IN_STEP,
        )
        self.synced_buffers = tuple(
            SyncedBuffer(plan, memory, self._axes(plan), self, memories)
            for plan, memory in zip(plans, memories, strict=True)
        )
        self._optimizers: WeakKeyDictionary[object, frozenset[ParamId]] = WeakKeyDictionary()
        self._zeroed: WeakSet[object] = WeakSet()  # optimizers that asked for it since the last `zero_grad_buffer`
        self._use_hooks: UseHooks | None = None
        if config.overlap_param_gather:
            self.enable_forward_pre_hook()
        self._bind()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward; parameters that are still on their way are awaited where they are read."""
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.grad_sync.note_forward()
        return self.module(*args, **kwargs)

    # --- gradients ------------------------------------------------------------------------------

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside only accumulate: for all microbatches but the last."""
        return self.grad_sync.no_sync()

    def start_grad_sync(self) -> None:
        """Starts the reduction of every bucket that is not under way yet."""
        self._param_sync.wait()
        self.grad_sync.start()

    def finish_grad_sync(self) -> None:
        """Completes the reduction of this iteration's gradients; a second call changes nothing.

        Raises:
            CollectiveError: a collective failed, or ran into the group's timeout; it names bucket and iteration.
            GradientError: on every rank, where gradients are not finite and `check_for_nan_in_grad` is set.
        """
        self.start_grad_sync()
        self.grad_sync.finish()
        if self._param_sync.buckets:
            self._param_sync.order = self.grad_sync.order[::-1]

    @torch.no_grad()
    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiplies the gradients: what was reduced to this rank, or, before the reduction, all of them.

        Raises:
            GradientError: a reduction is under way; finish it first.
        """
        for bucket in self.grad_sync.buckets:
            bucket.scale_(factor)

    def zero_grad_buffer(self) -> None:
        """Begins an iteration: all gradients are zero, and may accumulate."""
        self.grad_sync.begin()
        self._zeroed.clear()
        for buffer in self.synced_buffers:
            buffer.memory.zero_grads_()
        for bucket in self.grad_sync.buckets:
            for id, view in bucket.views.items():
                begin_accumulation(self._params[id], view)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """`zero_grad_buffer`, for callers that treat the wrapper as any module; gradients stay in their buffers."""
        self.zero_grad_buffer()

    def add_optimizer(self, optimizer: object, ids: Collection[ParamId]) -> None:
        """Makes an optimizer of some of the chunk's parameters known to `zero_grad_for`. It replaces former ones that
        share parameters with it."""
        own = frozenset(ids) & self._params.keys()
        for other in [other for other, theirs in self._optimizers.items() if theirs & own]:
            del self._optimizers[other]
        self._optimizers[optimizer] = own

    def zero_grad_for(self, optimizer: object) -> None:
        """`zero_grad_buffer`, once every optimizer of this chunk has asked for it."""
        self._zeroed.add(optimizer)
        if all(other in self._zeroed for other in self._optimizers):
            self.zero_grad_buffer()

    def offload_grad_buffers(self) -> None:
        """Gives the gradients' memory back; `zero_grad_buffer` or `restore_grad_buffers` takes it again."""
        self.grad_sync.begin()
        for bucket in self.grad_sync.buckets:
            bucket.send_away()
        for buffer in self.synced_buffers:
            buffer.memory.release_grads_()

    def restore_grad_buffers(self) -> None:
        """Takes the gradients' memory again, as zeros, and begins an iteration."""
        self.zero_grad_buffer()

    # --- parameters -----------------------------------------------------------------------------

    def start_param_sync(self, *, force_sync: bool = False) -> None:
        """Gathers every bucket from its owners, in the background where gathers overlap and `force_sync` is not set."""
        self._param_sync.start()
        if force_sync or not self.config.overlap_param_gather:
            self._param_sync.wait()

    def buffers_of(self, ids: Collection[ParamId]) -> tuple[SyncedBuffer, ...]:
        """The buffers that hold any of these parameters, for an optimizer that steps only these: a `publish_` of all of
        them starts their gathers, whatever the chunk's other buffers do."""
        found = [buffer for buffer in self.synced_buffers if not buffer.params.keys().isdisjoint(ids)]
        return tuple(buffer.published_with(found) for buffer in found)

    def publish(self, memory: ParamAndGradBuffer, *, together: Sequence[ParamAndGradBuffer]) -> None:
        """Reports that this rank has written its part of a buffer; with the last of `together`, their gathers start."""
        self._param_sync.publish(memory, together=together)

    def finish_param_sync(self) -> None:
        """Waits for parameters on their way. Nothing has to be called before a forward of this wrapper."""
        self._param_sync.wait()

    def disable_forward_pre_hook(self) -> None:
        """Completes the parameters; from now on gathers complete in the step, until hooks are enabled again."""
        self._param_sync.wait()
        self._param_sync.gathers = Gathers.IN_STEP
        if self._use_hooks is not None:
            self._use_hooks.remove()
            self._use_hooks = None

    def enable_forward_pre_hook(self) -> None:
        """Lets gathers overlap with the forward; every read of a parameter through its module waits for it.

        Raises:
            ValueError: `overlap_param_gather` is not set.
        """
        if not self.config.overlap_param_gather:
            raise ValueError("overlap_param_gather=False: parameters are complete after each step, without hooks")
        if self._use_hooks is None:
            self._use_hooks = UseHooks(self.module, self._param_sync)
            self._param_sync.gathers = Gathers.BEFORE_USE

    @torch.no_grad()
    def broadcast_params(self) -> None:
        """Writes every parameter: the first replica's values."""
        self._param_sync.wait()
        broadcast_replicas_(self._params, self.metas, self.roles)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The module's, under the module's own names, once its parameters are complete."""
        self._param_sync.wait()
        found: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Writes the module's parameters and buffers.

        Raises:
            ValueError: `assign` is set, which would take parameters out of their buffers.
        """
        if assign:
            raise ValueError("assign=True would take parameters out of their buffers; load with assign=False")
        self._param_sync.wait()
        return self.module.load_state_dict(state_dict, strict=strict)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What `to`, `half`, `cuda` and their like do.

        Raises:
            StorageError: it took parameters out of their buffers.
        """
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for buffer in self.synced_buffers:
            buffer.memory.check_in_place()
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a DistributedDataParallel holds process groups and memory shared with its module, so it is not copied or "
            "pickled; copy or save its module (ddp.module), or its state_dict()"
        )

    # --- construction ---------------------------------------------------------------------------

    def _axes(self, plan: BufferPlan) -> Axes:
        return self.roles.expert if plan.key.is_expert else self.roles.dense

    def _agreed_buffers(self, is_whole: IsWhole, shard_multiple: int) -> _Buffers:
        """Plans and memory; an error of one rank, or a difference between ranks, is every rank's error."""
        buffers, error = _Buffers((), ()), None
        try:
            check_config(self.config, self.roles, per_token=self.calculate_per_token_loss)
            check_unbound(self._params)
            buffers = self._make_buffers(is_whole, shard_multiple)
        except Exception as caught:  # of any kind, running out of memory too: the other ranks wait for the verdict
            error = caught
        families = ((self.roles.dense, False), (self.roles.expert, True))
        facts = [Facts(axes, self._facts(buffers.plans, is_expert=is_expert)) for axes, is_expert in families]
        agree_on(facts, error, peers=(self.roles.dense.tp, self.roles.expert.tp))
        return buffers

    def _facts(self, plans: Sequence[BufferPlan], *, is_expert: bool) -> dict[str, str]:
        """What all replicas of a family must have equal: configuration, kind of loss, order and layout of buffers."""
        facts = {field.name: repr(getattr(self.config, field.name)) for field in fields(self.config)}
        facts["calculate_per_token_loss"] = repr(self.calculate_per_token_loss)
        layouts = {str(p.key): p.layout.fingerprint()[:16] for p in plans if p.key.is_expert == is_expert}
        facts["order of buffers"] = ", ".join(layouts)
        return facts | {f"layout of {key}": fingerprint for key, fingerprint in layouts.items()}

    def _make_buffers(self, is_whole: IsWhole, shard_multiple: int) -> _Buffers:
        shards = NumShards(dense=self.roles.dense.dp.size, expert=self.roles.expert.dp.size)
        plans = plan_buffers(
            self.metas,
            self.config,
            num_shards=shards,
            num_ranks=self.roles.dense.num_replicas,
            is_whole=is_whole,
            shard_multiple=shard_multiple,
        )
        return _Buffers(plans, tuple(self._allocate(plan) for plan in plans))

    def _allocate(self, plan: BufferPlan) -> ParamAndGradBuffer:
        params = {shape.id: self._params[shape.id] for shape in plan.params}
        return ParamAndGradBuffer(
            plan.layout,
            params,
            param_dtype=plan.key.param_dtype,
            grad_dtype=plan.key.grad_dtype,
            device=next(iter(params.values())).device,
            sharded=self.config.use_distributed_optimizer,
        )

    def _travel(self, plan: BufferPlan) -> Travel:
        axes = self._axes(plan)
        mean = 1.0 if self.calculate_per_token_loss else 1.0 / self.roles.dense.num_replicas
        return Travel(
            name=f"{plan.key}",
            wire=self._wire(plan, axes),
            axes=axes,
            is_expert=plan.key.is_expert,
            scale_before=1.0 if self.config.average_in_collective else mean,
            scale_after=mean if self.config.average_in_collective else 1.0,
            check_for_nan=self.config.check_for_nan_in_grad,
        )

    def _wire(self, plan: BufferPlan, axes: Axes) -> Wire:
        if self.config.reduce_scatter_with_fp32_accumulation:
            return SumInFp32(axes.dp)
        return sum_over(axes, num_shards=plan.layout.num_shards)

    def _bind(self) -> None:
        for bucket in self.grad_sync.buckets:
            for id, view in bucket.views.items():
                param = self._params[id]
                bind_main_grad(param, view)
                param.register_post_accumulate_grad_hook(partial(self._on_grad, id, view))  # type: ignore[no-untyped-call]

    def _on_grad(self, id: ParamId, view: Tensor, param: Tensor) -> None:
        """Runs in backward, once a parameter's gradient of this backward pass is complete."""
        assert isinstance(param, nn.Parameter)
        self.grad_sync.check_accumulating(id)
        adopt_main_grad_(param, view, str(id))
        take_grad_(param)
        self.grad_sync.note(id)
