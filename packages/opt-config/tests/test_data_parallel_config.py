"""DistributedDataParallelConfig: its defaults, and the configurations that it refuses."""

import dataclasses

import pytest
import torch

from opt_config import ConfigError, DistributedDataParallelConfig
from opt_config.data_parallel_config import UNSUPPORTED_DATA_PARALLEL_FIELDS

# Megatron-Core 0.19.2, in its order; megatron_fsdp_version is newer.
DEFAULTS = {
    "grad_reduce_in_fp32": False, "overlap_grad_reduce": False, "overlap_param_gather": False,
    "align_param_gather": False, "use_distributed_optimizer": False, "num_distributed_optimizer_instances": 1,
    "check_for_nan_in_grad": False, "check_for_large_grads": False, "bucket_size": None, "num_buckets": None,
    "pad_buckets_for_high_nccl_busbw": False, "reduce_scatter_with_fp32_accumulation": False,
    "param_name_patterns_for_fp32_local_accumulation": (), "average_in_collective": False, "fp8_param_gather": False,
    "fp4_param_gather": False, "reuse_grad_buf_for_mxfp8_param_ag": False, "use_megatron_fsdp": False,
    "use_custom_fsdp": False, "data_parallel_sharding_strategy": "no_shard", "gradient_reduce_div_fusion": True,
    "suggested_communication_unit_size": None, "keep_fp8_transpose_cache": False, "nccl_ub": False,
    "fsdp_double_buffer": False, "fsdp_db_use_persist_buf_on_alloc_fail": False,
    "fsdp_all_gather_in_start_param_sync": True, "outer_dp_sharding_strategy": "no_shard",
    "disable_symmetric_registration": False, "fsdp_manual_registration": False, "delay_wgrad_compute": False,
    "megatron_fsdp_main_params_dtype": torch.float32, "megatron_fsdp_main_grads_dtype": None,
    "megatron_fsdp_grad_comm_dtype": None, "megatron_fsdp_use_decoupled_grad": False,
    "megatron_fsdp_cuda_graph_mode": False, "megatron_fsdp_enable_fine_grained_param_gather": False,
    "megatron_fsdp_max_pool_double_buffer": False, "megatron_fsdp_version": 1,
}  # fmt: skip
UNSUPPORTED = {name: DEFAULTS[name] for name in UNSUPPORTED_DATA_PARALLEL_FIELDS}

OWNER = "DistributedDataParallelConfig: "
PATTERNS = "param_name_patterns_for_fp32_local_accumulation"
FP32_SUMS = "reduce_scatter_with_fp32_accumulation"
SHARDED_SUMS = {FP32_SUMS: True, "use_distributed_optimizer": True}
INSTANCES = {"num_distributed_optimizer_instances": 2}
REFUSED = [
    ({"bucket_size": 0}, "bucket_size=0: must be at least 1 and finite"),
    ({"bucket_size": 2**63}, f"bucket_size={2**63}: must be an integer of at most 64 bits"),
    ({"bucket_size": 10, "num_buckets": 2}, "num_buckets=2: excludes bucket_size=10; set only one of them"),
    (INSTANCES, "num_distributed_optimizer_instances=2: must be 1 unless use_distributed_optimizer=True: only shards"),
    ({"align_param_gather": True}, "align_param_gather=True: has no effect without overlap_param_gather=True; set tha"),
    ({"reuse_grad_buf_for_mxfp8_param_ag": True}, "reuse_grad_buf_for_mxfp8_param_ag=True: has no effect without fp8_"),
    ({"disable_symmetric_registration": True}, "disable_symmetric_registration=True: has no effect without nccl_ub=Tr"),
    ({PATTERNS: ("all",), "grad_reduce_in_fp32": True}, f"{PATTERNS}=('all',): gradients are accumulated in fp32 alre"),
    ({FP32_SUMS: True}, f"{FP32_SUMS}=True: excludes use_distributed_optimizer=False, because it sums to shards"),
    (SHARDED_SUMS | {"grad_reduce_in_fp32": True}, f"{FP32_SUMS}=True: excludes grad_reduce_in_fp32=True, which alr"),
    (SHARDED_SUMS | {"average_in_collective": True}, f"{FP32_SUMS}=True: excludes average_in_collective=True, becau"),
    (INSTANCES | SHARDED_SUMS, f"{FP32_SUMS}=True: excludes more than one distributed optimizer instance; set only on"),
    ({PATTERNS: ["all"]}, f"{PATTERNS}=['all']: must be a tuple, each item a string"),
]


def test_defaults():
    fields = dataclasses.fields(DistributedDataParallelConfig)
    assert [(field.name, field.default) for field in fields] == list(DEFAULTS.items())


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=lambda value: str(value)[:50])
def test_a_bad_configuration_is_refused_with_its_message(given, message):
    with pytest.raises(ConfigError) as caught:
        DistributedDataParallelConfig(**given)
    assert str(caught.value).startswith(OWNER + message)


@pytest.mark.parametrize(("name", "default"), UNSUPPORTED.items(), ids=UNSUPPORTED)
def test_a_field_without_effect_accepts_only_its_default(name, default):
    other = {bool: not default, str: "optim", int: 2, type(None): 8}.get(type(default), torch.bfloat16)
    other = torch.bfloat16 if name.endswith("_dtype") else other
    DistributedDataParallelConfig(**{name: default})
    with pytest.raises(ConfigError) as caught:
        DistributedDataParallelConfig(**{name: other})
    assert str(caught.value) == f"{OWNER}{name}={other!r}: {UNSUPPORTED_DATA_PARALLEL_FIELDS[name]}"
