"""Chunks in `DistributedDataParallel`: their buffers for the plan and the step, and checks of their options."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import lcm
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from opt_config import ConfigError, DynamicScale, OptimizerConfig, Replicated
from opt_distributed.buffers.binding import is_bound
from opt_distributed.buffers.data_parallel import DistributedDataParallel
from opt_distributed.buffers.local_sums import matches
from opt_distributed.buffers.synced import SyncedBuffer
from opt_distributed.comm.collectives import Comm, group_of
from opt_distributed.comm.groups import Axes, Roles
from opt_distributed.step.coded_main import FP16
from opt_kernels.rules.base import Rule
from opt_kernels.works import StateSpec
from opt_paramgroups import ParamId
from opt_stack.chunks.other_wrappers import check_megatron_wrapper, is_megatron_wrapper
from opt_stack.planning.plan import BufferPlan, Spread


class WrappedBuffer(NamedTuple):
    """A buffer of a wrapped chunk: its plan, and the source of its gradients."""

    plan: BufferPlan
    source: SyncedBuffer


def wrapped_buffers(chunks: Sequence[nn.Module], *, trained: Collection[ParamId]) -> Iterator[WrappedBuffer]:
    """Yield the buffers of wrapped chunks that hold any parameter of `trained`, chunk by chunk."""
    for index, chunk in enumerate(chunks):
        if isinstance(chunk, DistributedDataParallel):
            for buffer in chunk.buffers_of(trained):
                yield WrappedBuffer(_plan(index, chunk, buffer), buffer)


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


def check_wrapped(config: OptimizerConfig, chunks: Sequence[nn.Module]) -> None:
    """Check that the optimizer's configuration agrees with the wrappers.

    Raises:
        ConfigError: a wrapper has another chunk number or another value of a shared option, or the model does not
            support an overlap.
    """
    sharded = not isinstance(config.sharding, Replicated)
    if config.overlap_param_gather_with_optimizer_step and len(chunks) == 1:
        raise ConfigError(
            "overlap_param_gather_with_optimizer_step=True gathers the first model chunk while the others are stepped, "
            "but the model has one chunk; set it to False, or pass two or more (interleaved pipeline stages)"
        )
    for index, chunk in enumerate(chunks):
        if not isinstance(chunk, DistributedDataParallel):
            if is_megatron_wrapper(chunk):
                check_megatron_wrapper(config, chunks, index)
            else:
                _check_plain(index, chunk)
            if config.reuse_grad_buf_for_mxfp8_param_ag:
                raise ConfigError(
                    f"reuse_grad_buf_for_mxfp8_param_ag=True, but model chunk {index} is a plain "
                    f"{type(chunk).__name__}, which has no gradient buffer; wrap it in DistributedDataParallel, or "
                    "leave it at False"
                )
            if config.overlap_param_gather:
                raise ConfigError(
                    f"overlap_param_gather=True, but model chunk {index} is a plain {type(chunk).__name__}: gathers "
                    "overlap with the forward of a chunk in DistributedDataParallel; wrap it, or set "
                    "overlap_param_gather=False"
                )
            continue
        if any(id.chunk != index for id in chunk.metas):
            raise ConfigError(
                f"model chunk {index} was wrapped as another chunk; pass chunk={index} to DistributedDataParallel"
            )
        _check_fields(config, index, chunk)
        for name in _SHARED:
            ours = sharded if name == "use_distributed_optimizer" else getattr(config, name)
            theirs = getattr(chunk.config, name)
            if ours != theirs:
                raise ConfigError(
                    f"OptimizerConfig has {name}={ours}, but model chunk {index} was wrapped with {name}={theirs}; "
                    f"wrap it with {name}=True, or leave {name} at False"
                )


def check_same_groups(chunks: Sequence[nn.Module], roles: Roles) -> None:
    """Check that wrappers reduce gradients over the optimizer's groups; another sum would pass for the mean.

    Raises:
        ConfigError: a wrapper has other data-parallel groups than the optimizer.
    """
    for index, chunk in enumerate(chunks):
        if not isinstance(chunk, DistributedDataParallel):
            continue
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


def check_blocks(
    chunks: Sequence[nn.Module],
    groups: Sequence[Mapping[str, Any]],
    rules: Mapping[str, Rule],
    *,
    mains: torch.dtype = torch.float32,
) -> None:
    """Check that shards do not cut blocks of state or main values that share one scale.

    Args:
        chunks: the model.
        groups: its parameter groups: `optimizer` and `param_ids` are read.
        rules: by the groups' `optimizer`.
        mains: the dtype of main values; torch.float16 is kept in blocks.

    Raises:
        ConfigError: shards of a wrapper may cut a block. Also on one rank, since the same wrapper on more ranks would.
    """
    rule_of = {id: rules[group["optimizer"]] for group in groups for id in group["param_ids"]}
    for index, chunk in enumerate(chunks):
        if not isinstance(chunk, DistributedDataParallel) or not chunk.config.use_distributed_optimizer:
            continue
        flat = [buffer.plan.params for buffer in chunk.synced_buffers if not buffer.plan.key.is_whole]
        cut = {param.id for params in flat for param in params}
        specs = [spec for id, rule in rule_of.items() if id in cut for spec in rule.state_specs if spec.block]
        if cut and mains is torch.float16:
            specs.append(StateSpec(name="main_params_scale", block=FP16.block))
        for spec in specs:
            if chunk.shard_multiple % spec.block:
                raise ConfigError(
                    f"{spec.name} is kept in blocks of {spec.block} elements, but model chunk {index} was wrapped with "
                    f"shard_multiple={chunk.shard_multiple}, which cuts blocks; pass "
                    f"shard_multiple={lcm(chunk.shard_multiple, spec.block)} to DistributedDataParallel"
                )


def _check_plain(index: int, chunk: nn.Module) -> None:
    """Raise ConfigError for a module inside a wrapper: the step would read `param.grad`, which is then empty."""
    bound = next((name for name, param in chunk.named_parameters() if param.requires_grad and is_bound(param)), None)
    if bound is not None:
        raise ConfigError(
            f"model chunk {index} is a plain {type(chunk).__name__}, but gradients of {bound!r} accumulate in "
            "main_grad, as a wrapper set up; pass the DistributedDataParallel around it to get_optimizer"
        )


def _check_fields(config: OptimizerConfig, index: int, chunk: DistributedDataParallel) -> None:
    """Raise ConfigError for a field of a wrapper that contradicts the optimizer's configuration."""
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


def check_patterns(chunks: Sequence[nn.Module], everyone: Comm) -> None:
    """Check that every pattern of `param_name_patterns_for_fp32_local_accumulation` matches a parameter of any chunk on
    any rank. Collective.

    Raises:
        ConfigError: on every rank, naming the pattern that matches nothing.
    """
    local: dict[str, bool] = {}  # whether each pattern matches
    for chunk in (chunk for chunk in chunks if isinstance(chunk, DistributedDataParallel)):
        for pattern in chunk.config.param_name_patterns_for_fp32_local_accumulation:
            local[pattern] = local.get(pattern, False) or any(matches(id.name, (pattern,)) for id in chunk.metas)
    per_rank: list[dict[str, bool]] = everyone.gather_objects(local)
    for pattern in dict.fromkeys(pattern for of_rank in per_rank for pattern in of_rank):
        if not any(of_rank.get(pattern) for of_rank in per_rank):
            raise ConfigError(
                f"param_name_patterns_for_fp32_local_accumulation: {pattern!r} matches no parameter of any wrapped "
                'model chunk; pass shell patterns of full names, such as "*.router.weight", or "all"'
            )


def _plan(index: int, chunk: DistributedDataParallel, buffer: SyncedBuffer) -> BufferPlan:
    key = buffer.plan.key
    sharded = Spread.WHOLE if key.is_whole else Spread.FLAT
    return BufferPlan(
        name=f"chunk {index}, {key}",
        dtype=key.param_dtype,
        is_expert=key.is_expert,
        spread=sharded if chunk.config.use_distributed_optimizer else Spread.REPLICATED,
        params=buffer.plan.params,
        layout=buffer.plan.layout,
    )
