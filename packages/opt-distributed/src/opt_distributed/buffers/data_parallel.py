"""`DistributedDataParallel`: a model chunk over contiguous buffers whose collectives overlap with compute."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Self
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from opt_config import DistributedDataParallelConfig
from opt_distributed.buffers.binding import adopt_main_grad_, begin_accumulation, bind_main_grad, take_grad_
from opt_distributed.buffers.bucket import GradBucket
from opt_distributed.buffers.chunk_buffers import ChunkBuffer, ChunkSpec, make_buffers
from opt_distributed.buffers.gather_order import share_gather_order
from opt_distributed.buffers.grad_sync import GradSync, Reduces
from opt_distributed.buffers.grouping import IsWhole, nothing_whole
from opt_distributed.buffers.launch_order import share_order
from opt_distributed.buffers.param_reads import UseHooks
from opt_distributed.buffers.param_sync import Gathers, ParamBucket, ParamSync
from opt_distributed.buffers.replicas import broadcast_replicas_
from opt_distributed.buffers.storage import ParamAndGradBuffer
from opt_distributed.buffers.stored import describe_stored
from opt_distributed.buffers.synced import SyncedBuffer
from opt_distributed.comm.find import Given, find_roles
from opt_distributed.layout.padding import SHARD_MULTIPLE
from opt_paramgroups import ParamId, ParamMeta
from opt_paramgroups.names import parameters_by_id


def share_launch_order(chunks: Sequence["DistributedDataParallel"]) -> None:
    """Lets the reductions of several chunks overlap with their backward passes although they share process groups.

    With `align_param_gather` it gives their gathers one order, too.

    The chunks' iterations must begin and end together: all backward passes run before the first `finish_grad_sync`.
    `get_optimizer` calls this for its chunks.

    Raises:
        ValueError: two chunks have the same number.
    """
    if chunks:
        share_order([chunk.grad_sync for chunk in chunks])
        share_gather_order([chunk.param_sync for chunk in chunks])


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
        self.metas: Mapping[ParamId, ParamMeta] = describe_stored([module], model_chunk_offset=chunk)
        buffers = make_buffers(
            ChunkSpec(
                config=config,
                params=self._params,
                metas=self.metas,
                roles=self.roles,
                is_whole=is_whole,
                shard_multiple=shard_multiple,
                calculate_per_token_loss=calculate_per_token_loss,
            )
        )
        if broadcast_params:
            broadcast_replicas_(self._params, self.metas, self.roles)
        self.param_sync = _param_sync(config, buffers, chunk)
        self.grad_sync = _grad_sync(config, buffers, chunk, before_launch=self._start_gathers)
        self._local_sums = tuple(buffer.sums for buffer in buffers)
        memories = [buffer.memory for buffer in buffers]
        self.synced_buffers = tuple(
            SyncedBuffer(buffer.plan, buffer.memory, buffer.travel.axes, self, memories) for buffer in buffers
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
        self.param_sync.wait()
        self.grad_sync.start()

    def finish_grad_sync(self) -> None:
        """Completes the reduction of this iteration's gradients; a second call changes nothing.

        Raises:
            CollectiveError: a collective failed, or ran into the group's timeout; it names bucket and iteration.
            GradientError: on every rank, where gradients are not finite and `check_for_nan_in_grad` is set.
        """
        self.start_grad_sync()
        self.grad_sync.finish()
        if self.param_sync.buckets:
            self.param_sync.order = self.grad_sync.order[::-1]

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
        self._wait_for_lent_grads()
        self.grad_sync.begin()
        self._zeroed.clear()
        for buffer in self.synced_buffers:
            buffer.memory.zero_grads_()
        for sums in self._local_sums:
            sums.zero_()
        for bucket in self.grad_sync.buckets:
            for id, accumulator in bucket.accumulators.items():
                begin_accumulation(self._params[id], accumulator)

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
        self._wait_for_lent_grads()
        self.grad_sync.begin()
        for bucket in self.grad_sync.buckets:
            bucket.send_away()
        for buffer in self.synced_buffers:
            buffer.memory.release_grads_()
        for sums in self._local_sums:
            sums.release_()

    def restore_grad_buffers(self) -> None:
        """Takes the gradients' memory again, as zeros, and begins an iteration."""
        self.zero_grad_buffer()

    # --- parameters -----------------------------------------------------------------------------

    def start_param_sync(self, *unused: Any, force_sync: bool = False) -> None:
        """Gathers every bucket from its owners, in the background where gathers overlap and `force_sync` is not set.

        With `align_param_gather`, unless `force_sync` is set, gathers only what was updated since its last gather, of
        this chunk and of chunks before it. A pipeline's schedule may call it with the chunk's parameters, as
        Megatron-Core's `param_sync_func`; they are not used.
        """
        if self.param_sync.gathers is Gathers.WHEN_ASKED and not force_sync:
            self.param_sync.start_asked()
            return
        self._start_gathers()
        self.param_sync.start()
        if force_sync or not self.config.overlap_param_gather:
            self.param_sync.wait()

    def buffers_of(self, ids: Collection[ParamId]) -> tuple[SyncedBuffer, ...]:
        """The buffers that hold any of these parameters, for an optimizer that steps only these: a `publish_` of all of
        them starts their gathers, whatever the chunk's other buffers do."""
        found = [buffer for buffer in self.synced_buffers if not buffer.params.keys().isdisjoint(ids)]
        return tuple(buffer.published_with(found) for buffer in found)

    def publish(self, memory: ParamAndGradBuffer, *, together: Sequence[ParamAndGradBuffer]) -> None:
        """Reports that this rank has written its part of a buffer; with the last of `together`, their gathers start."""
        self.param_sync.publish(memory, together=together)

    def lend_grads(self, memory: ParamAndGradBuffer) -> None:
        """Lets the parameters of a buffer overwrite its gradients, with `reuse_grad_buf_for_mxfp8_param_ag`.

        Raises:
            GradientError: no step has used the gradients.
        """
        for bucket in self.grad_sync.buckets:
            if bucket.memory is memory:
                bucket.lend_()

    def finish_param_sync(self) -> None:
        """Waits for parameters on their way. Nothing has to be called before a forward of this wrapper."""
        self.param_sync.wait()

    def disable_forward_pre_hook(self) -> None:
        """Completes the parameters; from now on gathers complete in the step, until hooks are enabled again."""
        self.param_sync.wait()
        self.param_sync.gathers = Gathers.IN_STEP
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
            self._use_hooks = UseHooks(self.module, self.param_sync)
            self.param_sync.gathers = Gathers.WHEN_ASKED if self.config.align_param_gather else Gathers.BEFORE_USE

    @torch.no_grad()
    def broadcast_params(self) -> None:
        """Writes every parameter: the first replica's values."""
        self.param_sync.wait()
        broadcast_replicas_(self._params, self.metas, self.roles)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The module's, under the module's own names, once its parameters are complete."""
        self.param_sync.wait()
        found: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Writes the module's parameters and buffers.

        Raises:
            ValueError: `assign` is set, which would take parameters out of their buffers.
        """
        if assign:
            raise ValueError("assign=True would take parameters out of their buffers; load with assign=False")
        self.param_sync.wait()
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

    def _wait_for_lent_grads(self) -> None:
        """Parameters that travel in the memory of gradients must have arrived before that is used again."""
        if self.config.reuse_grad_buf_for_mxfp8_param_ag:
            self.param_sync.wait()

    def _start_gathers(self) -> None:
        """Lets no reduction overtake a gather that other ranks may have started: not of any chunk."""
        self.param_sync.gather_order.start_all()

    def _bind(self) -> None:
        for bucket in self.grad_sync.buckets:
            for id, accumulator in bucket.accumulators.items():
                param = self._params[id]
                bind_main_grad(param, accumulator)
                param.register_post_accumulate_grad_hook(partial(self._on_grad, id, accumulator))  # type: ignore[no-untyped-call]

    def _on_grad(self, id: ParamId, accumulator: Tensor, param: Tensor) -> None:
        """Runs in backward, once a parameter's gradient of this backward pass is complete."""
        assert isinstance(param, nn.Parameter)
        self.grad_sync.check_accumulating(id)
        adopt_main_grad_(param, accumulator, str(id))
        take_grad_(param, str(id))
        self.grad_sync.note(id)


def _param_sync(config: DistributedDataParallelConfig, buffers: Sequence[ChunkBuffer], chunk: int) -> ParamSync:
    """The gathers of a chunk: none where parameters are replicated."""
    sharded = buffers if config.use_distributed_optimizer else ()
    buckets = [ParamBucket(buffer.memory, index, buffer.travel.axes.dp) for buffer, index in _buckets(sharded)]
    return ParamSync(buckets, gathers=Gathers.IN_STEP, number=chunk)


def _grad_sync(
    config: DistributedDataParallelConfig,
    buffers: Sequence[ChunkBuffer],
    chunk: int,
    *,
    before_launch: Callable[[], None],
) -> GradSync:
    """The reductions of a chunk."""
    return GradSync(
        [
            GradBucket(buffer.memory, index, buffer.travel, sums=buffer.sums.views)
            for buffer, index in _buckets(buffers)
        ],
        reduces=Reduces.IN_BACKWARD if config.overlap_grad_reduce else Reduces.IN_STEP,
        learns=config.overlap_grad_reduce or config.overlap_param_gather,
        number=chunk,
        before_launch=before_launch,
    )


def _buckets(buffers: Sequence[ChunkBuffer]) -> list[tuple[ChunkBuffer, int]]:
    """Every bucket of the buffers, as its buffer and its number there."""
    return [(buffer, index) for buffer in buffers for index in range(len(buffer.plan.layout.buckets))]
