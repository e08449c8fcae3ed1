"""Gradient sources: what sums the gradients of each buffer over ranks."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchWrapper

from opt_distributed.buffers import PRE_SHARDED, BufferPlan, ParamAndGradBuffer
from opt_distributed.comm import Alone, members, replicas_outside
from opt_distributed.pieces import (
    BufferedGrads,
    DTensorGrads,
    ParamGrads,
    PeerSums,
    QuantizedSource,
    ReducedMainGrads,
    Source,
    check_marks,
    marked_ids,
)
from opt_kernels.quantized import FP8, quantized
from opt_stack.planning.design import Design, is_megatron_wrapper
from opt_stack.wording import logger


class Sources(NamedTuple):
    """The gradient sources of a plan, by the names of its buffers."""

    of_buffers: Mapping[str, Source]
    fp8: Mapping[str, QuantizedSource]  # publish the buffers whose parameters are quantised after the update
    peer_sums: PeerSums


def build_sources(design: Design, device: torch.device) -> Sources:
    """Build the sources: those of wrapped chunks are their buffers."""
    model = design.model
    reducing = [chunk for chunk in design.request.chunks if model.shards_reduced or is_megatron_wrapper(chunk)]
    reduced = {id(param) for chunk in reducing for param in chunk.parameters()}
    averaged = _averaged_by_torch(design)
    of_buffers: dict[str, Source] = {buffer.plan.name: buffer for buffer in design.wrapped_buffers}
    plain = []
    fp8 = {}
    for buffer in design.plan.buffers:
        if buffer.name not in of_buffers:
            source = _source(buffer, design, device, reduced, averaged)
            of_buffers[buffer.name] = source
            plain.append(source)
        if buffer.dtype is FP8:
            stored = ((shape.id, quantized(model.params[shape.id])) for shape in buffer.params)
            codes = {id: tensor for id, tensor in stored if tensor is not None}
            sharing = design.axes_of(buffer).dp if buffer.layout.num_shards > 1 else Alone()
            fp8[buffer.name] = QuantizedSource(of_buffers[buffer.name], codes, sharing)
    peer_sums = PeerSums(plain, model.metas, design.roles, qk_layernorm=model.qk_layernorm)
    return Sources(of_buffers, fp8, peer_sums)


def _source(
    buffer: BufferPlan,
    design: Design,
    device: torch.device,
    reduced: set[int],  # `id` of parameters whose main_grad a wrapper reduces on every rank
    averaged: set[int],  # `id` of parameters whose gradients torch's DistributedDataParallel averages
) -> Source:
    """Return the gradient source of a buffer: `param.grad` if no other rank contributes, else a reduced buffer."""
    params = {shape.id: design.params[shape.id] for shape in buffer.params}
    axes = design.axes_of(buffer)
    replicas = design.roles.dense.num_replicas
    identities = set(map(id, params.values()))
    is_reduced = identities <= reduced
    if not is_reduced:  # Megatron-Core's schedule completes the gradients of its wrapper
        check_marks(params, design.metas, design.roles, qk_layernorm=design.model.qk_layernorm)
    if buffer.kind is PRE_SHARDED:
        outside = {name: replicas_outside(p, (axes.dp, axes.inter), name=str(name)) for name, p in params.items()}
        return DTensorGrads(params, outside, dtype=buffer.grad_dtype)
    if is_reduced and not buffer.kind.is_sharded:
        return ReducedMainGrads(params)
    marked = marked_ids(design.metas, design.roles, qk_layernorm=design.model.qk_layernorm)
    is_marked = not marked.isdisjoint(params)  # then gradients are summed in a buffer
    if axes.num_replicas == 1 and not is_marked and not is_reduced:
        return ParamGrads(params, num_replicas=replicas)
    memory = ParamAndGradBuffer(
        buffer.layout,
        params,
        param_dtype=buffer.dtype,
        grad_dtype=buffer.grad_dtype,
        device=device,
        sharded=buffer.kind.is_sharded,
        holds_grads=False,
        allocate=axes.dp.allocate,
    )
    if is_reduced:
        finishes = [chunk.finish_grad_sync for chunk in design.model.wrapped.values()]
        return ReducedMainGrads(params, finishes=finishes, memory=memory, comm=axes.dp)
    if identities <= averaged and not is_marked:
        return ParamGrads(params, num_replicas=1, memory=memory if buffer.kind.is_sharded else None, comm=axes.dp)
    return BufferedGrads(memory, axes, num_replicas=replicas)


def _averaged_by_torch(design: Design) -> set[int]:
    """Return the `id` of parameters whose gradients torch's wrapper averages over exactly the data-parallel ranks.

    The step reduces all others: those of wrappers over other ranks, and those that a wrapper ignores. A wrapper
    averages the parameters that required gradients when the model was wrapped. If today's trainable parameters are
    others, some were frozen or unfrozen since: the step reduces all of these, which leaves averaged gradients as they
    are.
    """
    axes = design.roles.dense
    averaged = set[int]()
    for wrapper in (module for chunk in design.request.chunks for module in chunk.modules()):
        if not isinstance(wrapper, TorchWrapper) or axes.inter.size > 1:
            continue
        if members(axes.dp) != dist.get_process_group_ranks(wrapper.process_group):
            continue
        trainable = {
            id(param)
            for prefix, module in wrapper.module.named_modules()
            for name, param in module.named_parameters(recurse=False)
            if param.requires_grad and f"{prefix}.{name}" not in wrapper.parameters_to_ignore
        }
        if _reduced_by(wrapper, len(trainable)) == trainable:
            averaged |= trainable
        else:
            logger.info(
                "parameters were frozen or unfrozen since DistributedDataParallel was built; the step reduces all"
            )
    if averaged:
        logger.info("gradients are averaged by torch's DistributedDataParallel; the step does not reduce them again")
    return averaged


def _reduced_by(wrapper: TorchWrapper, num_trainable: int) -> set[int]:
    """Return the `id` of the parameters that a wrapper of torch averages; empty if these are not `num_trainable`."""
    recorded = wrapper._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    if recorded["num_parameter_tensors"] != num_trainable:
        return set()
    given = {id(param) for param in wrapper._module_parameters}
    if len(given) == num_trainable:  # all that it was given
        return given
    buckets = wrapper.reducer._get_zeros_like_grad_buckets()  # takes the memory of these gradients for a moment
    return {id(param) for bucket in buckets for param in bucket.parameters()}
