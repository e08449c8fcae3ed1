"""Fields of Megatron-Core's data-parallel configuration that exist here, but accept only their defaults."""

import dataclasses
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from opt_config.errors import Problem
from opt_config.validate import Dataclass, field_default

_FSDP = (
    "this wrapper has no FSDP; shard the model with torch's fully_shard, and pass it to get_optimizer without a wrapper"
)
_OF_FSDP = "is an option of Megatron-FSDP, which this wrapper does not have; leave it out"

UNSUPPORTED_DATA_PARALLEL_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "fp4_param_gather": "parameters are gathered in fp8 or more bits; set fp8_param_gather=True instead",
        "use_megatron_fsdp": _FSDP,
        "use_custom_fsdp": _FSDP,
        "data_parallel_sharding_strategy": "must be 'no_shard'; set use_distributed_optimizer=True to shard main "
        "parameters and state, or shard the model with torch's fully_shard to shard parameters, too",
        "gradient_reduce_div_fusion": _OF_FSDP,
        "suggested_communication_unit_size": f"{_OF_FSDP}; bucket_size sets the size of collectives",
        "keep_fp8_transpose_cache": _OF_FSDP,
        "fsdp_double_buffer": _OF_FSDP,
        "fsdp_db_use_persist_buf_on_alloc_fail": _OF_FSDP,
        "fsdp_all_gather_in_start_param_sync": _OF_FSDP,
        "outer_dp_sharding_strategy": "must be 'no_shard'; set num_distributed_optimizer_instances to replicate the "
        "shards",
        "fsdp_manual_registration": _OF_FSDP,
        "delay_wgrad_compute": "weight gradients must be complete when backward ends; leave it out",
        "megatron_fsdp_main_params_dtype": f"{_OF_FSDP}; main_params_dtype of OptimizerConfig sets this dtype",
        "megatron_fsdp_main_grads_dtype": f"{_OF_FSDP}; grad_reduce_in_fp32 sets this dtype",
        "megatron_fsdp_grad_comm_dtype": f"{_OF_FSDP}; grad_reduce_in_fp32 sets this dtype",
        "megatron_fsdp_use_decoupled_grad": _OF_FSDP,
        "megatron_fsdp_cuda_graph_mode": _OF_FSDP,
        "megatron_fsdp_enable_fine_grained_param_gather": f"{_OF_FSDP}; overlap_param_gather=True gathers by bucket",
        "megatron_fsdp_max_pool_double_buffer": _OF_FSDP,
        "megatron_fsdp_version": _OF_FSDP,
    }
)
"""By field: why a value other than its default is refused, and what to write instead."""


def unsupported_problems(config: Dataclass, reasons: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a problem for each field of `reasons` that does not have its default."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in reasons and value != field_default(field):
            yield Problem(field.name, value, reasons[field.name])
