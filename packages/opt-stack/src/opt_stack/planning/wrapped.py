"""Chunks in wrappers: checks of our own, and of those of Megatron-Core and torch, which reduce before a step."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchWrapper

from opt_config import ConfigError, DynamicScale, OptimizerConfig, Replicated
from opt_distributed.buffers import DistributedDataParallel, is_bound
from opt_distributed.comm import Axes, Comm, group_of
from opt_paramgroups import ParamId
from opt_stack.planning.draft import Draft

logger = logging.getLogger("opt_stack")
_MODULE = "megatron.core.distributed.distributed_data_parallel"


def is_megatron_wrapper(chunk: nn.Module) -> bool:
    """Return whether a chunk is Megatron-Core's wrapper. Megatron-Core is not imported."""
    return any(cls.__module__ == _MODULE and cls.__name__ == "DistributedDataParallel" for cls in type(chunk).__mro__)


def check_megatron_wrapper(config: OptimizerConfig, chunks: Sequence[nn.Module], index: int) -> None:
    """Raise ConfigError if chunks have different wrappers, or if the wrapper or the optimizer shards state."""
    chunk = chunks[index]
    other = next((at for at, one in enumerate(chunks) if not is_megatron_wrapper(one)), None)
    if other is not None:
        raise ConfigError(
            f"model chunk {index} is in Megatron-Core's DistributedDataParallel and model chunk {other} is a "
            f"{type(chunks[other]).__name__}; wrap all chunks in the same class"
        )
    if chunk.ddp_config.use_distributed_optimizer:  # type: ignore[union-attr]
        raise ConfigError(
            f"model chunk {index} is in Megatron-Core's DistributedDataParallel with use_distributed_optimizer=True, "
            "which leaves each rank a shard of the gradients in its own layout; wrap it with "
            "use_distributed_optimizer=False, or use opt_stack.megatron.DistributedDataParallel, which shards"
        )
    if not isinstance(config.sharding, Replicated):
        raise ConfigError(
            f"use_distributed_optimizer={config.use_distributed_optimizer}, use_layer_wise_distributed_optimizer="
            f"{config.use_layer_wise_distributed_optimizer}: model chunk {index} is in Megatron-Core's "
            "DistributedDataParallel, which reduces all gradients to every rank; set both to False, or use "
            "opt_stack.megatron.DistributedDataParallel"
        )
    if config.optimizer_cuda_graph:
        raise ConfigError(
            f"optimizer_cuda_graph=True: model chunk {index} is in Megatron-Core's DistributedDataParallel, whose "
            "gradients may be bound to other memory; set it to False"
        )


def reduced_by_megatron(chunks: Sequence[nn.Module], params: Mapping[ParamId, nn.Parameter]) -> frozenset[ParamId]:
    """Return the parameters whose gradients Megatron-Core's wrapper reduces: all of its chunk."""
    reduced = {id(param) for chunk in chunks if is_megatron_wrapper(chunk) for param in chunk.parameters()}
    return frozenset(name for name, param in params.items() if id(param) in reduced)


def averaged_by_torch(
    chunks: Sequence[nn.Module], params: Mapping[ParamId, nn.Parameter], axes: Axes
) -> frozenset[ParamId]:
    """Return the parameters whose gradients torch's wrapper averages over exactly the data-parallel ranks of `axes`.

    The step reduces all others: those of wrappers over other ranks, those that a wrapper ignores, and all of a wrapper
    whose parameters were frozen or unfrozen since it was built.
    """
    if axes.inter.size > 1:
        return frozenset()
    wrappers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, TorchWrapper)]
    averaged = {id(param) for wrapper in wrappers if _is_over(wrapper, axes.dp) for param in _averaged(wrapper)}
    if averaged:
        logger.info("gradients are averaged by torch's DistributedDataParallel; the step does not reduce them again")
    return frozenset(name for name, param in params.items() if id(param) in averaged)


def _is_over(wrapper: TorchWrapper, replicas: Comm) -> bool:
    group = group_of(replicas)
    if group is None:
        return False
    ranks = dist.get_process_group_ranks(group)
    return dist.get_process_group_ranks(wrapper.process_group) == ranks


def _averaged(wrapper: TorchWrapper) -> list[nn.Parameter]:
    """The parameters that `wrapper` averages: those that required gradients when the model was wrapped.

    The wrapper does not list them, but records their number and bytes. If these are not those of today's trainable
    parameters, some were frozen or unfrozen since. Then none is returned, and the step reduces all, which leaves
    averaged gradients as they are.
    """
    ignored = set(wrapper.parameters_to_ignore)
    trainable = {
        param: None
        for prefix, module in wrapper.module.named_modules()
        for name, param in module.named_parameters(recurse=False)
        if param.requires_grad and f"{prefix}.{name}" not in ignored
    }
    recorded = wrapper._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    num_bytes = sum(param.numel() * param.element_size() for param in trainable)
    if (recorded["num_parameter_tensors"], recorded["total_parameter_size_bytes"]) != (len(trainable), num_bytes):
        logger.info("parameters were frozen or unfrozen since DistributedDataParallel was built; the step reduces all")
        return []
    return list(trainable)


_SHARED = ("use_distributed_optimizer", "overlap_param_gather", "reuse_grad_buf_for_mxfp8_param_ag")


def with_wrappers_fields(config: OptimizerConfig, chunks: Sequence[nn.Module]) -> OptimizerConfig:
    """Return `config` with the shared fields that wrapped chunks set and it leaves at False; `config` is not modified.

    Layer-wise sharding needs no `use_distributed_optimizer`. Raises ConfigError if the combination is not supported.
    """
    wrapped = [chunk.config for chunk in chunks if isinstance(chunk, DistributedDataParallel)]
    taken: dict[str, Any] = {
        name: True for name in _SHARED if any(getattr(one, name) for one in wrapped) and not getattr(config, name)
    }
    if not isinstance(config.sharding, Replicated):
        taken.pop("use_distributed_optimizer", None)
    return replace(config, **taken) if taken else config


def check_wrapped(draft: Draft) -> None:
    """Refuse a wrapper with another chunk number or another value of a shared option than the optimizer's
    configuration, and overlaps that the model does not support."""
    config, chunks = draft.config, draft.chunks
    if config.overlap_param_gather_with_optimizer_step and len(chunks) == 1:
        raise ConfigError(
            "overlap_param_gather_with_optimizer_step=True gathers the first model chunk while the others are stepped, "
            "but the model has one chunk; set it to False, or pass two or more (interleaved pipeline stages)"
        )
    for index, chunk in enumerate(chunks):
        if isinstance(chunk, DistributedDataParallel):
            _check_fields(config, index, chunk)
        else:
            _check_other(config, chunks, index)


def check_same_groups(draft: Draft) -> None:
    """Refuse wrappers that reduce over other groups than the optimizer's: their sum would pass for the mean."""
    roles = draft.roles
    for index, chunk in draft.wrapped.items() if draft.sizes is None else ():
        for family, ours, theirs in (
            ("data-parallel", roles.dense, chunk.roles.dense),
            ("expert data-parallel", roles.expert, chunk.roles.expert),
        ):
            if not (_is_same(ours.dp, theirs.dp) and _is_same(ours.inter, theirs.inter)):
                raise ConfigError(
                    f"model chunk {index} was wrapped with {family} groups of {_in_words(theirs)}, but the optimizer's "
                    f"are of {_in_words(ours)}; pass the same groups to both"
                )


def _is_same(one: Comm, other: Comm) -> bool:
    """Return whether both span the same ranks; by size and rank only, if one has no process group."""
    ours, theirs = _members(one), _members(other)
    return (one.size, one.rank) == (other.size, other.rank) and (ours == theirs or not ours or not theirs)


def _members(comm: Comm) -> list[int]:
    """Return the global ranks of a group; empty without a process group."""
    group = group_of(comm)
    return [] if group is None else dist.get_process_group_ranks(group)


def _in_words(axes: Axes) -> str:
    members = _members(axes.dp)
    listed = f" of {members}" if members else ""
    return f"{axes.dp.size} x {axes.inter.size} ranks (this one is {axes.dp.rank}, {axes.inter.rank}{listed})"


def _check_other(config: OptimizerConfig, chunks: Sequence[nn.Module], index: int) -> None:
    """Refuse options that only our wrapper has, and a module inside one: the step would read `param.grad`, which is
    then empty."""
    chunk = chunks[index]
    bound = next((name for name, param in chunk.named_parameters() if param.requires_grad and is_bound(param)), None)
    if is_megatron_wrapper(chunk):
        check_megatron_wrapper(config, chunks, index)
    elif bound is not None:
        raise ConfigError(
            f"model chunk {index} is a plain {type(chunk).__name__}, but gradients of {bound!r} accumulate in "
            "main_grad, as a wrapper set up; pass the DistributedDataParallel around it to get_optimizer"
        )
    if config.reuse_grad_buf_for_mxfp8_param_ag:
        raise ConfigError(
            f"reuse_grad_buf_for_mxfp8_param_ag=True, but model chunk {index} is a plain {type(chunk).__name__}, which "
            "has no gradient buffer; wrap it in DistributedDataParallel, or leave it at False"
        )
    if config.overlap_param_gather:
        raise ConfigError(
            f"overlap_param_gather=True, but model chunk {index} is a plain {type(chunk).__name__}: gathers overlap "
            "with the forward of a chunk in DistributedDataParallel; wrap it, or set overlap_param_gather=False"
        )


def _check_fields(config: OptimizerConfig, index: int, chunk: DistributedDataParallel) -> None:
    """Refuse a wrapper of another chunk, and fields of a wrapper that contradict the optimizer's configuration."""
    if any(id.chunk != index for id in chunk.metas):
        raise ConfigError(
            f"model chunk {index} was wrapped as another chunk; pass chunk={index} to DistributedDataParallel"
        )
    if chunk.config.check_for_large_grads and isinstance(config.loss_scaling, DynamicScale):
        raise ConfigError(
            f"model chunk {index} was wrapped with check_for_large_grads=True, which compares gradients of different "
            "iterations, but the loss scale is dynamic (fp16=True without loss_scale); set loss_scale, or wrap with "
            "check_for_large_grads=False and use grad_norm_skip_threshold, which compares unscaled norms"
        )
    if chunk.config.align_param_gather and config.overlap_param_gather_with_optimizer_step:
        raise ConfigError(
            "overlap_param_gather_with_optimizer_step=True starts gathers in the step, but model chunk "
            f"{index} was wrapped with align_param_gather=True, which starts them from the pipeline's schedule; "
            "set one of the two to False"
        )
    if config.main_grads_dtype is torch.bfloat16 and chunk.config.grad_reduce_in_fp32:
        raise ConfigError(
            f"main_grads_dtype=torch.bfloat16, but model chunk {index} was wrapped with grad_reduce_in_fp32=True; "
            "wrap it with grad_reduce_in_fp32=False, or leave main_grads_dtype at torch.float32"
        )
    for name in _SHARED:
        is_sharding = name == "use_distributed_optimizer"
        ours = not isinstance(config.sharding, Replicated) if is_sharding else getattr(config, name)
        if ours != (theirs := getattr(chunk.config, name)):
            raise ConfigError(
                f"OptimizerConfig has {name}={ours}, but model chunk {index} was wrapped with {name}={theirs}; "
                f"wrap it with {name}=True, or leave {name} at False"
            )
