"""Megatron-Core's documented names: change the imports of existing code to this module.

    from opt_stack.megatron import OptimizerConfig, OptimizerParamScheduler, get_megatron_optimizer

Positional parameters are those of Megatron-Core; additional ones are keyword-only.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.distributed import ProcessGroup

import opt_config
from opt_checkpoint import (
    KEEP_VARS_HINT,
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    dist_checkpointing,
    get_optim_param_to_id_map,
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
    optim_state_to_sharding_state,
)
from opt_checkpoint.state import ShardedStateDict, StateDict
from opt_config import ConfigError, ParamKey, ParamPredicate, ParamWithNamePredicate
from opt_distributed.buffers import DistributedDataParallel as Wrapper
from opt_distributed.buffers import Metas
from opt_distributed.comm import ProcessGroupCollection, ProcessGroups, TorchComm, agreed, world
from opt_paramgroups import (
    GroupsAndBuffers,
    ParamGroup,
    describe,
    get_mup_config_overrides,
    get_param_groups,
    get_param_groups_and_buffers,
    matches,
)
from opt_paramgroups import get_standard_config_overrides as overrides_by_name
from opt_paramgroups.overrides import ConfigOverrides
from opt_scheduler import (
    OptimizerParamScheduler,
    ParamGroupOverride,
    combine_param_group_overrides,
    get_canonical_lr_for_logging,
    param_group_override_to_tuple,
)
from opt_stack.factory import get_optimizer_based_on_param_groups
from opt_stack.megatron.clip_grads import clip_grad_by_total_norm_fp32, count_zeros_fp32, get_grad_norm_fp32
from opt_stack.megatron.configs import (
    AdamOptimizerConfig,
    DistributedDataParallelConfig,
    OptimizerConfig,
    SGDOptimizerConfig,
)
from opt_stack.megatron.kinds import (
    ChainedOptimizer,
    DistributedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    LayerWiseDistributedOptimizer,
    MixedPrecisionOptimizer,
)
from opt_stack.megatron.modules import add_modules_
from opt_stack.megatron.names import (
    DistributedDataParallel,
    finalize_model_grads,
    get_megatron_muon_optimizer,
    get_megatron_optimizer,
    layer_wise,
)
from opt_stack.megatron.script import (
    OptimizerCudaGraphWrapper,
    clip_qk,
    param_group_identifier_keys,
    tag_params_for_buffer_routing,
)
from opt_stack.optimizer import MegatronOptimizer
from opt_stack.planning.design import ModelChunks
from opt_stack.rules.entries import ParamGroups
from opt_stack.rules.registry import Registry, with_matrix_rule
from opt_stack.wording import logger

__all__ = [
    "KEEP_VARS_HINT", "AdamOptimizerConfig", "ChainedOptimizer", "DistributedDataParallel",
    "DistributedDataParallelConfig", "DistributedOptimizer", "FP32Optimizer", "Float16OptimizerWithFloat16Params",
    "LayerWiseDistributedOptimizer", "LocalNonpersistentObject", "MegatronOptimizer", "MixedPrecisionOptimizer",
    "OptimizerConfig", "OptimizerCudaGraphWrapper", "OptimizerParamScheduler", "ParamGroupOverride", "ParamKey",
    "ParamPredicate", "ParamWithNamePredicate", "ProcessGroupCollection", "SGDOptimizerConfig", "ShardedObject",
    "ShardedStateDict", "ShardedTensor", "ShardedTensorFactory", "StateDict",
    "_get_megatron_optimizer_based_on_param_groups", "_get_param_groups", "_get_param_groups_and_buffers", "_matches",
    "clip_grad_by_total_norm_fp32", "clip_qk", "combine_param_group_overrides", "count_zeros_fp32",
    "dist_checkpointing",
    "finalize_model_grads", "get_canonical_lr_for_logging", "get_grad_norm_fp32", "get_megatron_muon_optimizer",
    "get_megatron_optimizer", "get_mup_config_overrides", "get_optim_param_to_id_map",
    "get_param_id_to_sharded_param_map", "get_standard_config_overrides", "logger", "make_sharded_optimizer_tensor",
    "optim_state_to_sharding_state", "param_group_identifier_keys", "param_group_override_to_tuple",
    "tag_params_for_buffer_routing",
]  # fmt: skip

AnyConfig = opt_config.OptimizerConfig
_matches = matches
add_modules_(sys.modules[__name__])
sys.modules[f"{__name__}.dist_checkpointing"] = dist_checkpointing


def get_standard_config_overrides(config: AnyConfig) -> ConfigOverrides:
    """Return Megatron-Core's default overrides: no weight decay of `*.bias` and 1-D parameters, and decoupled rates.

    `opt_paramgroups.get_standard_config_overrides` recognises more parameters without decay.
    """
    return overrides_by_name(config, by_name=False)


def _routed(
    config: AnyConfig,
    overrides: ConfigOverrides | None,
    rules: Registry | None,
    model_chunks: ModelChunks,
    *,
    offset: int = 0,
) -> tuple[ConfigOverrides, Metas]:
    """Return the overrides and roles of parameters that `get_megatron_optimizer` uses, or raise on every rank."""

    def read() -> tuple[ConfigOverrides, Metas]:
        routed = with_matrix_rule(config, overrides, rules or Registry().with_installed(), by_name=False)
        return routed, describe(model_chunks, model_chunk_offset=offset, by_name=False)

    return agreed(world(), read)


def _get_param_groups(
    model_chunks: ModelChunks,
    config: AnyConfig,
    config_overrides: ConfigOverrides | None,
    *,
    rules: Registry | None = None,
) -> list[ParamGroup]:
    """Return the groups that `get_megatron_optimizer` makes, equal on all ranks of the world. Collective.

    See `opt_paramgroups.get_param_groups`, also for the errors.
    """
    config = layer_wise(config, rules)
    overrides, metas = _routed(config, config_overrides, rules, model_chunks)
    return get_param_groups(model_chunks, config, overrides, gather=world().gather_objects, metas=metas)


def _get_param_groups_and_buffers(
    model_chunks: ModelChunks,
    model_chunk_offset: int,
    config: AnyConfig,
    config_overrides: ConfigOverrides | None,
    filter_fn: Callable[[ParamGroup], bool],
    buffer_name: str,
    *,
    rules: Registry | None = None,
) -> GroupsAndBuffers:
    """Return the groups that `filter_fn` accepts, and each chunk's buffers. Collective.

    See `opt_paramgroups.get_param_groups_and_buffers`. Chunks in `DistributedDataParallel` have their buffers under
    `buffer_name="synced_buffers"`. Raises ConfigError, on every rank.
    """
    config = layer_wise(config, rules)
    overrides, metas = _routed(config, config_overrides, rules, model_chunks, offset=model_chunk_offset)
    return get_param_groups_and_buffers(
        model_chunks,
        model_chunk_offset,
        config,
        overrides,
        filter_fn,
        buffer_name,
        gather=world().gather_objects,
        metas=metas,
    )


def _get_megatron_optimizer_based_on_param_groups(
    config: AnyConfig,
    model_chunks: ModelChunks,
    param_groups: ParamGroups,
    per_model_buffers: Mapping[int, Sequence[Any]] | None = None,
    model_parallel_group: ProcessGroup | None = None,
    data_parallel_group: ProcessGroup | None = None,
    data_parallel_group_gloo: ProcessGroup | None = None,
    data_parallel_group_idx: int | None = None,
    intra_dist_opt_group: ProcessGroup | None = None,
    distributed_optimizer_instance_id: int | None = 0,
    *,
    tensor_parallel_group: ProcessGroup | None = None,
    rules: Registry | None = None,
) -> MegatronOptimizer:
    """Build the optimizer of these groups, of dense parameters and of experts. Collective over `intra_dist_opt_group`,
    or over the world without it.

    Args:
        config, model_chunks, param_groups: as for `get_optimizer_based_on_param_groups`.
        per_model_buffers: the buffers of `model_chunks`, by chunk number. Only checked: wrapped chunks are asked for
            their buffers.
        model_parallel_group: the ranks that together hold one copy of these parameters.
        data_parallel_group: the ranks that hold the same parameters. None, if no other group is given: the world.
        data_parallel_group_gloo: a gloo group of the same ranks, or None. Only its size is checked.
        data_parallel_group_idx: the number of this data-parallel group; a `state_dict` of another group is refused.
        intra_dist_opt_group: all ranks over which gradient norms are summed: those of the two groups above.
        distributed_optimizer_instance_id: must be 0. For several instances, use `get_megatron_optimizer` with process
            groups by role.
        tensor_parallel_group: the ranks among which tensor parallelism cuts these parameters.
        rules: as for `get_megatron_optimizer`.

    Raises:
        ConfigError, on every rank: sizes of groups contradict each other, or buffers are not those of `model_chunks`;
            and as `get_optimizer_based_on_param_groups`.
    """

    def checked() -> ProcessGroups | None:
        if distributed_optimizer_instance_id:
            raise ConfigError(
                f"distributed_optimizer_instance_id={distributed_optimizer_instance_id}: several instances need the "
                "groups between them; call get_optimizer_based_on_param_groups with pg_collection(inter_dist_opt=..., "
                "...)"
            )
        wrapped = [chunk for chunk in model_chunks if isinstance(chunk, Wrapper)]
        buffers = {id(buffer) for chunk in wrapped for buffer in chunk.synced_buffers}
        for number, given in (per_model_buffers or {}).items():
            if any(id(buffer) not in buffers for buffer in given):
                raise ConfigError(
                    f"per_model_buffers[{number}] holds buffers that no chunk of model_chunks has; pass the "
                    "synced_buffers of chunks in DistributedDataParallel, or None"
                )
        return _process_groups(
            model_chunks,
            dp=data_parallel_group,
            gloo=data_parallel_group_gloo,
            mp=model_parallel_group,
            intra_dist_opt=intra_dist_opt_group,
            tp=tensor_parallel_group,
        )

    everyone = world() if intra_dist_opt_group is None else TorchComm(intra_dist_opt_group)
    groups = agreed(everyone, checked)
    part = "" if data_parallel_group_idx is None else f"data-parallel group {data_parallel_group_idx}"
    return get_optimizer_based_on_param_groups(
        layer_wise(config, rules), model_chunks, param_groups, pg_collection=groups, rules=rules, part=part
    )


_Ranks = ProcessGroup | None


def _process_groups(
    model_chunks: ModelChunks, *, dp: _Ranks, gloo: _Ranks, mp: _Ranks, intra_dist_opt: _Ranks, tp: _Ranks
) -> ProcessGroups | None:
    """Return the groups of ranks by role, None for the world. Raises ConfigError if they contradict each other."""
    if dp is None:
        if mp is not None or intra_dist_opt is not None:
            raise ConfigError(
                "data_parallel_group=None, but other groups are given; pass the ranks that hold the same parameters"
            )
        return None
    if gloo is not None and gloo.size() != dp.size():
        raise ConfigError(
            f"data_parallel_group_gloo has {gloo.size()} ranks, data_parallel_group {dp.size()}; pass the same ranks"
        )
    expected = dp.size() * (1 if mp is None else mp.size())
    if intra_dist_opt is not None and intra_dist_opt.size() != expected:
        raise ConfigError(
            f"intra_dist_opt_group has {intra_dist_opt.size()} ranks, but data_parallel_group and "
            f"model_parallel_group span {expected}; norms are summed over all of these"
        )
    # Else norms would count replicated parameters repeatedly.
    if tp is None and mp is not None and mp.size() > 1:
        for meta in describe(model_chunks).values():
            if meta.tensor_parallel:
                raise ConfigError(
                    f"parameter {str(meta.id)!r} is cut by tensor parallelism, but tensor_parallel_group=None; pass it"
                )
    return ProcessGroups(dp=dp, expt_dp=dp, mp=mp, tp_ep_pp=mp, intra_dist_opt=intra_dist_opt, tp=tp, expt_tp=tp)
