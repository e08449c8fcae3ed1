"""DistributedDataParallelConfig: how gradients are reduced and parameters gathered over data-parallel ranks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from opt_config.errors import AT_LEAST_ONE, Finding, changed_fields, check, interval_problems
from opt_config.files import Configuration


@dataclass
class DistributedDataParallelConfig(Configuration):
    """Configuration of the data-parallel wrapper. Field names, order and defaults are those of Megatron-Core.

    Fields without a description exist so that Megatron-Core's configurations can be passed on. A value other than the
    default is refused: see `UNSUPPORTED_DATA_PARALLEL_FIELDS`.

    Raises `ConfigError`, which names every invalid field. A configuration that is passed in is never modified.

    >>> DistributedDataParallelConfig(bucket_size=0)
    Traceback (most recent call last):
    opt_config.errors.ConfigError: DistributedDataParallelConfig: bucket_size=0: must be at least 1 and finite
    """

    grad_reduce_in_fp32: bool = False
    """Accumulate and reduce gradients in fp32; False: in the parameters' dtype."""
    overlap_grad_reduce: bool = False
    """Reduce each bucket during the backward pass as soon as its gradients are ready."""
    overlap_param_gather: bool = False
    """Gather each bucket's parameters during the forward pass, before they are used."""
    align_param_gather: bool = False
    """The pipeline schedule starts the gathers, by `start_param_sync`. A read of a parameter starts them, too, for its
    chunk and those before it."""
    use_distributed_optimizer: bool = False
    """Reduce-scatter gradients to shards and gather parameters. False: all-reduce gradients."""
    num_distributed_optimizer_instances: int = 1
    """Number of groups of ranks: state is sharded within each of them and replicated across them."""
    check_for_nan_in_grad: bool = False
    """Check each bucket for NaN and infinity before it is reduced; the step then raises on every rank. Not for
    dynamic loss scales, whose first steps overflow: they would raise instead of lowering the scale."""
    check_for_large_grads: bool = False
    """Refuse a step in which the norm of a bucket, before it is reduced, exceeds ten times the largest norm of the
    first hundred iterations."""
    bucket_size: int | None = None
    """Number of elements at which a bucket is closed. None: max(40 000 000, 1 000 000 x ranks)."""
    num_buckets: int | None = None
    """Number of buckets of the dense parameters, and again of the experts. Replaces `bucket_size`."""
    pad_buckets_for_high_nccl_busbw: bool = False
    """Pad buckets to multiples of 2**16 elements, at which NCCL is fastest."""
    reduce_scatter_with_fp32_accumulation: bool = False
    """Send gradients in their own dtype and sum them in fp32."""
    param_name_patterns_for_fp32_local_accumulation: tuple[str, ...] = ()
    """Shell patterns of parameter names. The gradients of these parameters are accumulated over microbatches in fp32 on
    each rank and rounded once before they are sent. "all" matches every parameter."""
    average_in_collective: bool = False
    """Average in the collective. False: scale the gradients first, then sum."""
    fp8_param_gather: bool = False
    """Keep and gather the parameters in fp8."""
    fp4_param_gather: bool = False
    reuse_grad_buf_for_mxfp8_param_ag: bool = False
    """Gather mxfp8 parameters through the gradient buffer."""
    use_megatron_fsdp: bool = False
    use_custom_fsdp: bool = False
    data_parallel_sharding_strategy: str = "no_shard"
    gradient_reduce_div_fusion: bool = True
    suggested_communication_unit_size: int | None = None
    keep_fp8_transpose_cache: bool = False
    nccl_ub: bool = False
    """Allocate the buffers from NCCL's memory and register them with their process groups, which must use NCCL."""
    fsdp_double_buffer: bool = False
    fsdp_db_use_persist_buf_on_alloc_fail: bool = False
    fsdp_all_gather_in_start_param_sync: bool = True
    outer_dp_sharding_strategy: str = "no_shard"
    disable_symmetric_registration: bool = False
    """Register NCCL buffers locally. False: as symmetric memory, which needs torch 2.9."""
    fsdp_manual_registration: bool = False
    delay_wgrad_compute: bool = False
    megatron_fsdp_main_params_dtype: torch.dtype | None = torch.float32
    megatron_fsdp_main_grads_dtype: torch.dtype | None = None
    megatron_fsdp_grad_comm_dtype: torch.dtype | None = None
    megatron_fsdp_use_decoupled_grad: bool = False
    megatron_fsdp_cuda_graph_mode: bool = False
    megatron_fsdp_enable_fine_grained_param_gather: bool = False
    megatron_fsdp_max_pool_double_buffer: bool = False
    megatron_fsdp_version: int = 1

    def validate(self) -> None:
        """Check the current values of all fields. Raises `ConfigError` with every problem."""
        check(self, _field_problems, _conflicts)


_INTERVALS = dict.fromkeys(("num_distributed_optimizer_instances", "bucket_size", "num_buckets"), AT_LEAST_ONE)


def _field_problems(config: DistributedDataParallelConfig) -> Iterator[Finding]:
    yield from interval_problems(config, _INTERVALS)
    for name in changed_fields(config, UNSUPPORTED_DATA_PARALLEL_FIELDS):
        yield name, UNSUPPORTED_DATA_PARALLEL_FIELDS[name]


def _conflicts(config: DistributedDataParallelConfig) -> Iterator[Finding]:
    if config.bucket_size is not None and config.num_buckets is not None:
        yield "num_buckets", f"excludes bucket_size={config.bucket_size}; set only one of them"
    if config.num_distributed_optimizer_instances > 1 and not config.use_distributed_optimizer:
        reason = "must be 1 unless use_distributed_optimizer=True: only shards are divided into instances"
        yield "num_distributed_optimizer_instances", reason
    if config.align_param_gather and not config.overlap_param_gather:
        yield "align_param_gather", "has no effect without overlap_param_gather=True; set that too"
    if config.fp8_param_gather and not config.use_distributed_optimizer:
        yield "fp8_param_gather", "needs use_distributed_optimizer=True: without shards no parameters are gathered"
    if config.reuse_grad_buf_for_mxfp8_param_ag and not config.fp8_param_gather:
        yield "reuse_grad_buf_for_mxfp8_param_ag", "has no effect without fp8_param_gather=True; set that too"
    if config.disable_symmetric_registration and not config.nccl_ub:
        yield "disable_symmetric_registration", "has no effect without nccl_ub=True; set that too"
    if config.param_name_patterns_for_fp32_local_accumulation and config.grad_reduce_in_fp32:
        reason = "gradients are accumulated in fp32 already; leave it out, or set grad_reduce_in_fp32=False"
        yield "param_name_patterns_for_fp32_local_accumulation", reason
    obstacles = {
        "grad_reduce_in_fp32=True, which already sends fp32": config.grad_reduce_in_fp32,
        "average_in_collective=True, because it can only sum": config.average_in_collective,
        "use_distributed_optimizer=False, because it sums to shards": not config.use_distributed_optimizer,
        "more than one distributed optimizer instance": config.num_distributed_optimizer_instances > 1,
    }
    for obstacle, present in obstacles.items():
        if config.reduce_scatter_with_fp32_accumulation and present:
            yield "reduce_scatter_with_fp32_accumulation", f"excludes {obstacle}; set only one of them"


_NO_FSDP = (
    "this wrapper has no FSDP; shard the model with torch's fully_shard, and pass it to get_optimizer without a wrapper"
)
_FSDP_OPTION = "is an option of Megatron-FSDP, which this wrapper does not have; leave it out"

_FSDP_OPTIONS = (
    "gradient_reduce_div_fusion keep_fp8_transpose_cache fsdp_double_buffer fsdp_db_use_persist_buf_on_alloc_fail "
    "fsdp_all_gather_in_start_param_sync fsdp_manual_registration megatron_fsdp_use_decoupled_grad "
    "megatron_fsdp_cuda_graph_mode megatron_fsdp_max_pool_double_buffer megatron_fsdp_version"
)
_OPTIONS_WITH_A_COUNTERPART = {
    "suggested_communication_unit_size": "bucket_size sets the size of collectives",
    "megatron_fsdp_main_params_dtype": "main_params_dtype of OptimizerConfig sets this dtype",
    "megatron_fsdp_main_grads_dtype": "grad_reduce_in_fp32 sets this dtype",
    "megatron_fsdp_grad_comm_dtype": "grad_reduce_in_fp32 sets this dtype",
    "megatron_fsdp_enable_fine_grained_param_gather": "overlap_param_gather=True gathers by bucket",
}
_OTHER_REASONS = {
    "fp4_param_gather": "parameters are gathered in fp8 or more bits; set fp8_param_gather=True instead",
    "use_megatron_fsdp": _NO_FSDP,
    "use_custom_fsdp": _NO_FSDP,
    "data_parallel_sharding_strategy": "must be 'no_shard'; set use_distributed_optimizer=True to shard main "
    "parameters and state, or shard the model with torch's fully_shard to shard parameters, too",
    "outer_dp_sharding_strategy": "must be 'no_shard'; set num_distributed_optimizer_instances to replicate the shards",
    "delay_wgrad_compute": "weight gradients must be complete when backward ends; leave it out",
}
_REASONS = dict.fromkeys(_FSDP_OPTIONS.split(), _FSDP_OPTION) | _OTHER_REASONS
_REASONS |= {name: f"{_FSDP_OPTION}; {counterpart}" for name, counterpart in _OPTIONS_WITH_A_COUNTERPART.items()}
UNSUPPORTED_DATA_PARALLEL_FIELDS: Mapping[str, str] = MappingProxyType(_REASONS)
"""By field: why a value other than the default is refused, and what to write instead."""
