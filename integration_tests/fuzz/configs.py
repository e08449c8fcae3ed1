"""Translate a case into the project's configurations."""

import dataclasses
from typing import Any

import torch

from fuzz.cases import (
    ADAM_BETAS,
    ADAM_EPS,
    ADAPTIVE_BETA2,
    ADAPTIVE_EPS,
    LION_BETAS,
    LR,
    MUON_MOMENTUM,
    SGD_MOMENTUM,
    WEIGHT_DECAY,
    Case,
    Setup,
)
from opt_config import DistributedDataParallelConfig, OptimizerConfig


def optimizer_config(case: Case, setup: Setup, rank: int) -> OptimizerConfig:
    """The case as an `OptimizerConfig`."""
    numbers: dict[str, Any] = {
        "fp32": {},
        "bf16": {"bf16": True},
        "bf16_remainder": {"bf16": True, "use_precision_aware_optimizer": True},
        "bf16_short": {"bf16": True, "use_precision_aware_optimizer": True, "main_params_dtype": torch.int8},
        "bf16_scaled": {"bf16": True, "use_precision_aware_optimizer": True, "main_params_dtype": torch.float16},
        "bf16_grads": {"bf16": True, "use_precision_aware_optimizer": True, "main_grads_dtype": torch.bfloat16},
        "bf16_narrow": {
            "bf16": True,
            "use_precision_aware_optimizer": True,
            "exp_avg_dtype": torch.bfloat16,
            "exp_avg_sq_dtype": torch.bfloat16,
        },
        "fp16": {
            "fp16": True,
            "initial_loss_scale": case.scale,
            "loss_scale_window": case.window,
            "hysteresis": case.hysteresis,
        },
        "fp16_constant": {"fp16": True, "loss_scale": case.scale},
    }[case.numbers_of(setup)]
    config = OptimizerConfig(
        optimizer=case.rule.removesuffix("_l2"),
        decoupled_weight_decay=case.rule != "adam_l2",
        lr=LR,
        weight_decay=WEIGHT_DECAY,
        clip_grad=case.clip,
        log_num_zeros_in_grad=case.counts_zeros,
        adam_beta1=ADAM_BETAS[0],
        adam_beta2=ADAM_BETAS[1],
        adam_eps=ADAM_EPS,
        sgd_momentum=SGD_MOMENTUM,
        lion_beta1=LION_BETAS[0],
        lion_beta2=LION_BETAS[1],
        muon_momentum=MUON_MOMENTUM,
        muon_nesterov=case.nesterov,
        muon_tp_mode=case.tp_mode,
        muon_fp32_matmul_prec="highest",
        muon_scale_mode=case.scale_mode,
        grad_norm_skip_threshold=case.skip_above,
        adaptive_muon_moment2_method=case.moment2,
        adaptive_muon_beta2=ADAPTIVE_BETA2,
        adaptive_muon_eps=ADAPTIVE_EPS,
        use_distributed_optimizer=setup.sharding == "flat",
        use_layer_wise_distributed_optimizer=setup.sharding == "whole",
        overlap_param_gather=setup.overlap_gather,
        overlap_param_gather_with_optimizer_step=setup.gathers_with_step,
        optimizer_cpu_offload=setup.on_host > 0,
        optimizer_offload_fraction=setup.on_host,
        **numbers,
    )
    if case.mistake is not None and case.mistake.rank in (None, rank):
        return dataclasses.replace(config, **dict(case.mistake.fields))
    return config


def ddp_config(case: Case, setup: Setup, rank: int) -> DistributedDataParallelConfig:
    """The wrapper's part of the setup."""
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=setup.reduce_in_fp32,
        overlap_grad_reduce=setup.overlap_grads,
        overlap_param_gather=setup.overlap_gather,
        align_param_gather=setup.aligned,
        check_for_nan_in_grad=setup.checks_nan,
        use_distributed_optimizer=setup.is_sharded,
        num_distributed_optimizer_instances=setup.grid.instances,
        bucket_size=setup.bucket_size,
        num_buckets=setup.num_buckets,
        pad_buckets_for_high_nccl_busbw=setup.pads_for_busbw,
        reduce_scatter_with_fp32_accumulation=setup.sum_in_fp32,
        average_in_collective=setup.average_in_collective,
        param_name_patterns_for_fp32_local_accumulation=("all",) if setup.sums_locally else (),
    )
    if case.mistake is not None and case.mistake.rank in (None, rank):
        return dataclasses.replace(config, **dict(case.mistake.ddp_fields))
    return config
