"""Checks of chunks in `DistributedDataParallel` or the wrapper of Megatron-Core: their options, groups and memory."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from opt_config import ConfigError, DynamicScale, OptimizerConfig, Replicated
from opt_distributed.buffers.binding import is_bound
from opt_distributed.buffers.data_parallel import DistributedDataParallel
from opt_distributed.comm.collectives import Comm, group_of
from opt_distributed.comm.groups import Axes
from opt_stack.planning.draft import Draft
from opt_stack.planning.other_wrappers import check_megatron_wrapper, is_megatron_wrapper

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
