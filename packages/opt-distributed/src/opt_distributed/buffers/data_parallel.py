"""`DistributedDataParallel`: a model chunk over contiguous buffers whose collectives overlap with compute."""

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol, Self
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed.buffers.bucket import BucketState, GradBucket
from opt_distributed.buffers.chunk_buffers import ChunkSpec, SyncedBuffer, make_buffers, sharding_of
from opt_distributed.buffers.gathered import GatheredParams
from opt_distributed.buffers.grad_sync import GradSync, grad_hook, share_order
from opt_distributed.buffers.main_grad import RefusedGradientError, bind_main_grad, leave_out_of_pickles
from opt_distributed.buffers.param_sync import Gathers, ParamBucket, ParamSync, UseHooks, share_gather_order
from opt_distributed.buffers.stored import broadcast_replicas_, check_untrained, describe_stored, not_trained
from opt_distributed.comm.collectives import agreed, telling
from opt_distributed.comm.roles import Given, find_roles, marks_set, uses_qk_layernorm
from opt_paramgroups import Metas, ParamId, parameters_by_id


def share_launch_order(chunks: Sequence["DistributedDataParallel"]) -> None:
    """Let the reductions of several chunks, which share process groups, overlap with their backward passes.

    With `align_param_gather`, their gathers get a common order, too.

    The iterations of the chunks must begin and end together: all backward passes run before the first
    `finish_grad_sync`.
    `get_optimizer` calls this for its chunks.

    Raises:
        ValueError: two chunks have the same number.
    """
    if chunks:
        share_order([chunk.grad_sync for chunk in chunks])
        share_gather_order([chunk.param_sync for chunk in chunks])


class DropsGrads(Protocol):
    """What a chunk needs of its optimizers."""

    def drop_ready_grads(self) -> None: ...  # gradients that were prepared for a step are cleared


class DistributedDataParallel(nn.Module):
    """Wraps one model chunk. Gradients accumulate in `param.main_grad`, in buffers that are reduced bucket by bucket.

    One iteration::

        for microbatch in microbatches[:-1]:
            with ddp.no_sync():
                loss(ddp(microbatch)).backward()
        loss(ddp(last)).backward()      # with overlap_grad_reduce, buckets are reduced while this runs
        optimizer.step()                # finishes the reduction, updates, publishes
        optimizer.zero_grad()           # or ddp.zero_grad_buffer(), or both

    After the reduction, this rank's part of a gradient is the mean over the dense replicas. This also applies to
    experts, whose gradients are summed over a smaller group. With `calculate_per_token_loss` it is the sum, and the
    caller divides by the number of tokens (`scale_gradients`, `finalize_model_grads`). If state is sharded, other parts
    of `main_grad` are undefined after the reduction. A tensor that the caller binds to `param.main_grad` replaces the
    gradient at the next backward pass or reduction; it must have the parameter's shape.

    Collective over all ranks: each must wrap as many chunks as the others.

    Args:
        config: the configuration, which is not modified.
        module: the chunk. Its parameters move into the buffers, so convert it and move it to its device before.
        groups: process groups by role (`ProcessGroups`, Megatron-Core's own collection, or `Roles`). None: as in
            `opt_stack.get_optimizer`, all ranks are replicas unless parameters are marked otherwise.
        mesh: a `DeviceMesh` over the whole world, instead of `groups`.
        broadcast_params: copy the weights and persistent buffers of the first replica to the others, as the method of
            this name does. If False, `opt_stack.get_optimizer` compares replicas, and refuses them if they differ.
        optimizer_config: the configuration of the optimizer that will train the chunk. Needed for layer-wise sharding,
            which keeps matrices whole. Without it, any parameter may be cut.
        calculate_per_token_loss: whether losses are sums over tokens.
        chunk: the number of the chunk in a virtual pipeline.

    Raises:
        LayoutError, StorageError: on every rank, if parameters of a rank cannot be laid out (for example DTensors),
            or layouts or configurations differ between ranks.
        ValueError: the model is wrapped already, or, on every rank, `broadcast_params` differs between ranks.
    """

    by_name: ClassVar[bool] = True  # as for `describe`: which parameters are embeddings

    @torch.inference_mode(False)  # a backward pass must be able to write the buffers
    def __init__(
        self,
        config: DistributedDataParallelConfig,
        module: nn.Module,
        *,
        groups: Given = None,
        mesh: DeviceMesh | None = None,
        broadcast_params: bool = False,
        optimizer_config: OptimizerConfig | None = None,
        calculate_per_token_loss: bool = False,
        chunk: int = 0,
    ):
        super().__init__()
        self.ddp_config = config
        self.module = module
        self._chunk = chunk
        self.calculate_per_token_loss = calculate_per_token_loss
        self.roles = find_roles([module], groups, mesh=mesh, sharded=False)
        self.metas: Metas = agreed(
            self.roles.everyone, lambda: describe_stored([module], model_chunk_offset=chunk, by_name=self.by_name)
        )
        broadcasts = self.roles.everyone.gather_objects(broadcast_params)
        if len(set(broadcasts)) > 1:
            raise ValueError(f"broadcast_params is {broadcasts}, by rank; pass the same on all ranks")
        self._params = parameters_by_id([module], model_chunk_offset=chunk)
        spec = ChunkSpec(
            config=config,
            params=self._params,
            metas=self.metas,
            others=list(not_trained(module)),
            roles=self.roles,
            chunk=chunk,
            sharding=sharding_of(config, optimizer_config),
            calculate_per_token_loss=calculate_per_token_loss,
        )
        self.synced_buffers = make_buffers(spec)
        self._make_syncs()
        if broadcast_params:
            self.broadcast_params()
        self.marked = tuple(meta for meta in self.metas.values() if marks_set(meta, qk_layernorm=True))
        self.qk_layernorm = uses_qk_layernorm(module)  # whether gradients of norms of queries and keys are partial
        self.num_finalized = 0  # chunks that `finalize_model_grads` completed in one call with this one; 0: none yet
        self.is_scaled = False  # whether `scale_gradients` was called in this iteration
        self._optimizers: WeakKeyDictionary[DropsGrads, frozenset[ParamId]] = WeakKeyDictionary()
        self._zeroed: WeakSet[object] = WeakSet()  # optimizers that asked for it since the last `zero_grad_buffer`
        self._use_hooks: UseHooks | None = None
        if config.overlap_param_gather:
            self.enable_forward_pre_hook()
        self._bind()

    def _make_syncs(self) -> None:
        """Create the gathers and reductions of all buckets, and let the buffers use them in a step."""
        config = self.ddp_config
        buffers = self.synced_buffers
        gathered = []
        reduced = []
        for buffer in buffers:
            for at in range(len(buffer.plan.layout.buckets)):
                reduced.append(GradBucket(buffer.memory, at, buffer.reduction, sums=buffer.sums.views))
                if config.use_distributed_optimizer:  # else parameters are replicated
                    gathered.append(ParamBucket(buffer.memory, at, buffer.axes.dp))
        self.param_sync = ParamSync(gathered, number=self._chunk)
        self.grad_sync = GradSync(
            reduced,
            in_backward=config.overlap_grad_reduce,
            learns=config.overlap_grad_reduce or config.overlap_param_gather,
            number=self._chunk,
            before_launch=lambda: self.param_sync.start_all(),
        )
        memories = {buffer.memory for buffer in buffers}
        for buffer in buffers:
            buffer.attach(self._finish, self.grad_sync, GatheredParams(buffer.memory, self.param_sync, memories))

    def _bind(self) -> None:
        """Let gradients accumulate in the buffers."""
        for bucket in self.grad_sync.buckets:
            for id, accumulator in bucket.accumulators.items():
                param = self._params[id]
                bind_main_grad(param, accumulator)
                leave_out_of_pickles(param)
                hook = grad_hook(self.grad_sync, id)
                param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's forward. Reads of parameters wait for pending gathers."""
        # One rank may evaluate alone, without `torch.no_grad()`; training in evaluation mode is noted in backward.
        if self.module.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.grad_sync.has_run = True  # its backward may launch buckets on this rank or another
        if self._use_hooks is None and self.param_sync.is_pending:  # after disable_forward_pre_hook(param_sync=False)
            self.param_sync.wait()
        return self.module(*args, **kwargs)

    # --- gradients ------------------------------------------------------------------------------

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients without reducing them inside: for all microbatches except the last."""
        return self.grad_sync.no_sync()

    def start_grad_sync(self, *unused: Any) -> None:
        """Start the reduction of every bucket that has not started yet. A pipeline's schedule may pass the chunk's
        parameters, as to Megatron-Core's `grad_sync_func`; they are not used."""
        self.param_sync.wait()
        self.grad_sync.start()

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Complete the reduction of this iteration's gradients. A second call does nothing.

        `force_all_reduce`: with sharded state, all-reduce instead of reduce-scattering, in all chunks of the optimizer,
        so that every rank has whole gradients in `main_grad`, for example to write them to a file.

        Raises:
            CollectiveError: a collective failed, or exceeded the timeout of its group; names bucket and iteration.
            GradientError: on every rank, if gradients are not finite and `check_for_nan_in_grad` is set, or if
                `force_all_reduce` is set after the reduction to shards has begun.
            ValueError: `force_all_reduce` with `overlap_grad_reduce` and sharded state.
        """
        with self.telling():
            self._finish(force_all_reduce)

    def _finish(self, force_all_reduce: bool = False) -> None:
        if force_all_reduce and self.ddp_config.use_distributed_optimizer:
            if self.ddp_config.overlap_grad_reduce:
                raise ValueError(
                    "force_all_reduce=True, but overlap_grad_reduce=True reduces gradients to shards in backward; wrap "
                    "the model with overlap_grad_reduce=False"
                )
            self.grad_sync.reduce_everywhere()
        self.start_grad_sync()
        self.grad_sync.finish()
        if self.param_sync.buckets:
            self.param_sync.order = [bucket.key.number for bucket in reversed(self.grad_sync.order)]

    def telling(self) -> AbstractContextManager[None]:
        """Tell ranks that wait for this one of an error that is raised inside."""
        roles = self.roles
        return telling((roles.everyone, roles.totals, *roles.comms), unless=RefusedGradientError)

    @torch.no_grad()
    def scale_gradients(self, scaling_factor: float | Tensor) -> None:
        """Multiply all gradients; after the reduction, only this rank's results.

        Raises:
            GradientError: a reduction is pending; finish it first.
        """
        for bucket in self.grad_sync.buckets:
            bucket.scale_(scaling_factor)
        self.is_scaled = True

    def mark_finalized(self) -> None:
        """Accept this iteration's gradients as complete, because the caller has done the work of
        `finalize_model_grads`: summed those of marked parameters over peers."""
        self.num_finalized = sys.maxsize

    def zero_grad_buffer(self) -> None:
        """Begin an iteration: set all gradients to zero."""
        self._wait_for_lent_grads()
        with self.telling():
            self.grad_sync.begin()
        self.num_finalized = 0
        self.is_scaled = False
        for optimizer in self._optimizers:
            optimizer.drop_ready_grads()
        self._zeroed.clear()
        for buffer in self.synced_buffers:
            buffer.memory.grads.zero_()
            buffer.sums.zero_()
        for bucket in self.grad_sync.buckets:
            for id, accumulator in bucket.accumulators.items():
                self._params[id].grad = None  # a failed backward may have left it
                bind_main_grad(self._params[id], accumulator)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Call `zero_grad_buffer`, for callers that treat the wrapper as a module; gradients stay in their buffers."""
        self.zero_grad_buffer()

    def add_optimizer(self, optimizer: DropsGrads, ids: Collection[ParamId]) -> None:
        """Register an optimizer of some of the chunk's parameters, for `zero_grad_for`.

        It replaces earlier ones that have any of these parameters.
        """
        own = frozenset(ids) & self._params.keys()
        for other in [other for other, ids_of_other in self._optimizers.items() if ids_of_other & own]:
            del self._optimizers[other]
        self._optimizers[optimizer] = own

    @property
    def optimizers(self) -> list[object]:
        """The optimizers of the chunk's parameters."""
        return list(self._optimizers)

    def zero_grad_for(self, optimizer: object) -> None:
        """Call `zero_grad_buffer` once every optimizer of this chunk has called this method."""
        self._zeroed.add(optimizer)
        if all(other in self._zeroed for other in self._optimizers):
            self.zero_grad_buffer()

    def offload_grad_buffers(self, synchronize: bool = True, empty_cache: bool = True) -> None:
        """Free the memory of gradients. `zero_grad_buffer` or `restore_grad_buffers` allocates it again.

        On an accelerator, `synchronize` waits for queued work first, and `empty_cache` returns the memory from torch's
        cache to the device.

        Raises ValueError with `nccl_ub`: memory that is allocated again would not be registered.
        """
        if self.ddp_config.nccl_ub:
            raise ValueError("nccl_ub=True: gradients are in registered memory, which is not freed; set it to False")
        self._wait_for_lent_grads()
        self.grad_sync.begin()
        if synchronize:
            self._synchronize()
        for bucket in self.grad_sync.buckets:
            bucket.state = BucketState.RELEASED
        for buffer in self.synced_buffers:
            buffer.memory.grads.release_()
            buffer.sums.release_()
        if empty_cache:
            for device in {buffer.memory.device for buffer in self.synced_buffers}:
                if device.type not in ("cpu", "meta"):
                    torch.get_device_module(device).empty_cache()

    def restore_grad_buffers(self, synchronize: bool = True) -> None:
        """Allocate the memory of gradients again, as zeros, and begin an iteration. `synchronize`: wait until the
        device has done so."""
        self.zero_grad_buffer()
        if synchronize:
            self._synchronize()

    def _wait_for_lent_grads(self) -> None:
        """Wait for parameters that are gathered through the memory of gradients, before that is used again."""
        if self.ddp_config.reuse_grad_buf_for_mxfp8_param_ag:
            self.param_sync.wait()

    def _synchronize(self) -> None:
        """Let the host wait for the work that is queued on the current streams of the buffers' devices."""
        for buffer in self.synced_buffers:
            buffer.memory.queues.current_stream().record_event().synchronize()

    # --- parameters -----------------------------------------------------------------------------

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Gather every bucket from its owners, in the background with `overlap_param_gather` and without `force_sync`.

        With `align_param_gather`, and without `force_sync` or `force_dispatch`, it only gathers buckets that were
        updated since their last gather, of this chunk and of chunks before it. A pipeline's schedule may pass the
        chunk's parameters, as to Megatron-Core's `param_sync_func`; they are not used.
        """
        if self.param_sync.gathers is Gathers.WHEN_ASKED and not (force_sync or force_dispatch):
            self.param_sync.start_asked()
            return
        self.param_sync.start_all()
        self.param_sync.start()
        if force_sync or not self.ddp_config.overlap_param_gather:
            self.param_sync.wait()

    def buffers_of(self, ids: Collection[ParamId]) -> tuple[SyncedBuffer, ...]:
        """Return the buffers that hold any of these parameters, for an optimizer of only these.

        When all of them are published, their gathers start, independently of other buffers of the chunk.
        """
        buffers = [buffer for buffer in self.synced_buffers if not buffer.params.keys().isdisjoint(ids)]
        return tuple(buffer.published_with(buffers) for buffer in buffers)

    def finish_param_sync(self) -> None:
        """Wait for pending gathers of parameters. Need not be called before a forward of this wrapper."""
        self.param_sync.wait()

    free_overlap_buffers = finish_param_sync  # Megatron-Core's name, for example before a checkpoint is written

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Let gathers complete in the step until hooks are enabled again.

        Complete the parameters now, or, with `param_sync=False`, at the next forward of this wrapper.
        """
        if param_sync:
            self.param_sync.wait()
        self.param_sync.gathers = Gathers.IN_STEP
        if self._use_hooks is not None:
            self._use_hooks.remove()
            self._use_hooks = None

    def enable_forward_pre_hook(self) -> None:
        """Let gathers overlap with the forward. Every read of a parameter through its module waits for its gather.

        Raises:
            ValueError: `overlap_param_gather` is not set.
        """
        if not self.ddp_config.overlap_param_gather:
            raise ValueError(
                "overlap_param_gather=False: parameters are complete after each step; set it to True for hooks"
            )
        if self._use_hooks is None:
            self._use_hooks = UseHooks(self.module, self.param_sync)
            self.param_sync.gathers = Gathers.WHEN_ASKED if self.ddp_config.align_param_gather else Gathers.BEFORE_USE

    @torch.no_grad()
    def broadcast_params(self) -> None:
        """Copy every parameter and persistent buffer from the first replica to the others. Collective."""
        self.param_sync.wait()
        broadcast_replicas_(self._params, self.metas, self.roles)
        check_untrained([self.module], self.roles, broadcast=True, model_chunk_offset=self._chunk)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Wait for pending gathers, and return the module's state dict, with the module's own names."""
        self.param_sync.wait()
        state: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the module's parameters and buffers.

        Raises:
            ValueError: `assign` is set, which would take parameters out of their buffers.
        """
        if assign:
            raise ValueError("assign=True would take parameters out of their buffers; load with assign=False")
        self.param_sync.wait()
        return self.module.load_state_dict(state_dict, strict=strict)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the module, for `to`, `cuda` and similar methods. A step needs it where it was when it was wrapped.

        Raises:
            StorageError: parameters were converted to another dtype.
        """
        self.param_sync.wait()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for buffer in self.synced_buffers:
            buffer.memory.check_converted()
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a DistributedDataParallel holds process groups and memory shared with its module, so it is not copied or "
            "pickled; copy or save its module (ddp.module), or its state_dict()"
        )
