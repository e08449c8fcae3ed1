"""What the fields of `OptimizerConfig` may hold: their intervals and choices, and which values conflict."""

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from opt_config.errors import (
    AT_LEAST_ONE,
    INT8_CODES,
    Finding,
    Interval,
    changed_fields,
    did_you_mean,
    interval_problems,
)

if TYPE_CHECKING:
    from opt_config.optimizer_config import OptimizerConfig

NOT_NEGATIVE = Interval(0)
POSITIVE = Interval(0, low_open=True)
POSITIVE_OR_INFINITE = Interval(0, low_open=True, high_open=False)
AT_LEAST_TWO = Interval(2)
DECAY_RATE = Interval(0, 1)
FRACTION = Interval(0, 1, high_open=False)
SHARE = Interval(0, 1, low_open=True, high_open=False)

_FIELDS_OF_INTERVALS = {
    NOT_NEGATIVE: "lr min_lr decoupled_lr decoupled_min_lr weight_decay clip_grad",
    POSITIVE: "loss_scale initial_loss_scale min_loss_scale adam_eps muon_extra_scale_factor adaptive_muon_eps",
    POSITIVE_OR_INFINITE: "grad_norm_skip_threshold skip_sigma",
    AT_LEAST_TWO: "skip_window",
    AT_LEAST_ONE: (
        "loss_scale_window hysteresis muon_num_ns_steps soap_precondition_frequency soap_max_precond_dim ema_from_step"
    ),
    DECAY_RATE: (
        "adam_beta1 adam_beta2 sgd_momentum muon_momentum lion_beta1 lion_beta2 soap_shampoo_beta adaptive_muon_beta2 "
        "ema_decay ema_nesterov_beta ema_nesterov_gamma"
    ),
    FRACTION: "optimizer_offload_fraction",
    SHARE: "ema_share",
}
INTERVALS = {name: interval for interval, names in _FIELDS_OF_INTERVALS.items() for name in names.split()}

_MOMENTS = (torch.float32, torch.float16, torch.bfloat16, torch.uint8)

_PARAMS = (torch.float32, torch.float16, torch.bfloat16)
_MAINS = (torch.float32, torch.float16, torch.int8)
_DTYPES = {
    "params_dtype": _PARAMS,
    "main_grads_dtype": (torch.float32, torch.bfloat16),
    "main_params_dtype": _MAINS,
    "exp_avg_dtype": _MOMENTS,
    "exp_avg_sq_dtype": _MOMENTS,
}
_FP8_RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4")
_WORDS = {
    "muon_scale_mode": "spectral unit_rms_norm shape_scaling match_rms_adamw mup",
    "muon_fp32_matmul_prec": "highest high medium",
    "muon_coefficient_type": "simple quintic polar_express cans deepseekv4 cubic5 aol",
    "muon_tp_mode": "blockwise duplicated layer_sharded distributed",
    "muon_scalar_optimizer": "adam lion",
    "soap_order": "paper megatron",
    "adaptive_muon_moment2_method": "adamuon adamuon_paper normuon namo",
    "adaptive_muon_lines": "rows cols longer",
    "muon_weight_decay_method": "decoupled independent",
    "muon_pre_norm": "none rows",
    "muon_post_norm": "none frobenius rows cols rows_cols cols_rows",
    "optimizer_offload_compute": "host device",
}
_STRINGS = {name: tuple(words.split()) for name, words in _WORDS.items()}
CHOICES: Mapping[str, tuple[object, ...]] = {"fp8_recipe": _FP8_RECIPES, **_DTYPES, **_STRINGS}

# Fields without effect unless another one is set. Without it, a value other than the default is refused, because it
# would be silently ignored.
_NARROWER = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
_FIELDS_THAT_NEED = {
    "fp8_recipe": "reuse_grad_buf_for_mxfp8_param_ag",
    "use_precision_aware_optimizer": f"store_param_remainders {' '.join(_NARROWER)}",
    "decoupled_lr": "decoupled_min_lr",
    "overlap_param_gather": "overlap_param_gather_with_optimizer_step",
    "skip_sigma": "skip_window",
    "optimizer_cpu_offload": (
        "optimizer_offload_fraction use_torch_optimizer_for_cpu_offload overlap_cpu_optimizer_d2h_h2d pin_cpu_grads "
        "pin_cpu_params optimizer_offload_compute"
    ),
    "ema_decay": "ema_from_step ema_share",
    "ema_nesterov_beta": "ema_nesterov_gamma",
    "fp16": "initial_loss_scale min_loss_scale loss_scale_window hysteresis",  # else the loss scale is not dynamic
}
AVERAGED = ("ema_decay", "ema_nesterov_beta")
"""Fields that each switch on an average of the weights."""


def field_problems(config: "OptimizerConfig") -> Iterator[Finding]:
    """Find single fields outside their interval or choices, an invalid name of a rule, and an invalid average."""
    yield from interval_problems(config, INTERVALS)
    yield from _choice_problems(config)
    if isinstance(config.optimizer, str) and not re.fullmatch(r"[A-Za-z_][\w.:-]*", config.optimizer):
        yield "optimizer", "must be the name of a rule, such as adam, sgd or muon"
    decay = config.ema_decay
    if isinstance(decay, Mapping):
        if set(decay) != {"half_life", "num_steps"}:
            yield "ema_decay", "must have half_life, a fraction of the training, and num_steps, the number of its steps"
        elif decay["half_life"] not in SHARE or decay["num_steps"] not in AT_LEAST_ONE:
            yield "ema_decay", "half_life must be in (0, 1], and num_steps at least 1"


def _choice_problems(config: "OptimizerConfig") -> Iterator[Finding]:
    for name, allowed in CHOICES.items():
        value = getattr(config, name)
        if value is not None and value not in allowed:
            known = [str(choice) for choice in allowed]
            hint = did_you_mean(value, known) if isinstance(value, str) else ""
            hint = f" {INT8_CODES.capitalize()}." if value is torch.int8 and "exp_avg" in name else hint
            yield name, f"must be one of {', '.join(known)}.{hint}"


def conflicts(config: "OptimizerConfig") -> Iterator[Finding]:
    """Find fields that are valid individually but not together."""
    yield from _needs(config)
    yield from _learning_rates(config)
    yield from _dtypes(config)
    yield from _precision_aware(config)
    yield from _fp8(config)
    yield from _shards(config)
    yield from _averages(config)
    if config.optimizer_cpu_offload and config.optimizer_offload_fraction == 0:
        yield "optimizer_offload_fraction", "offloads nothing; set it in (0, 1], or set optimizer_cpu_offload=False"
    if config.optimizer_cpu_offload and config.optimizer_cuda_graph:
        yield (
            "optimizer_cpu_offload",
            "excludes optimizer_cuda_graph: a graph cannot wait for an update on the host; set only one of them",
        )
    if config.optimizer_offload_compute == "device" and config.use_torch_optimizer_for_cpu_offload:
        yield (
            "optimizer_offload_compute",
            "excludes use_torch_optimizer_for_cpu_offload, which updates on the host; set only one of them",
        )
    if config.optimizer.lower() == "adamw" and not config.decoupled_weight_decay:
        yield (
            "decoupled_weight_decay",
            "contradicts optimizer='adamw', which decouples it; set optimizer='adam' to add it to the gradient",
        )
    if config.min_loss_scale > config.initial_loss_scale:
        yield "min_loss_scale", f"must not be above initial_loss_scale={config.initial_loss_scale!r}"


def _needs(config: "OptimizerConfig") -> Iterator[Finding]:
    for needed, names in _FIELDS_THAT_NEED.items():
        if changed_fields(config, [needed]):
            continue
        for name in changed_fields(config, names.split()):
            yield name, f"has no effect without {needed}; set that too, or leave this at its default"


def _learning_rates(config: "OptimizerConfig") -> Iterator[Finding]:
    for low_name, high_name in (("min_lr", "lr"), ("decoupled_min_lr", "decoupled_lr")):
        low = getattr(config, low_name)
        high = getattr(config, high_name)
        if low is not None and high is not None and low > high:
            yield low_name, f"must not be above {high_name}={high!r}"
    min_lr = config.min_lr
    decoupled_lr = config.decoupled_lr
    if decoupled_lr is not None and config.decoupled_min_lr is None and min_lr is not None and min_lr > decoupled_lr:
        yield "decoupled_lr", f"must not be below {min_lr=}, to which the schedule would raise it; set decoupled_min_lr"


def _dtypes(config: "OptimizerConfig") -> Iterator[Finding]:
    if config.fp16 and config.bf16:
        yield "fp16", "excludes bf16=True; set only one of them"
    by_flag = torch.float16 if config.fp16 else torch.bfloat16 if config.bf16 else None
    if by_flag is not None and config.params_dtype not in (torch.float32, by_flag):
        flag = "fp16" if config.fp16 else "bf16"
        yield "params_dtype", f"contradicts {flag}=True; leave it out or set {by_flag}"
    if by_flag is None and config.params_dtype is torch.float16:
        yield "params_dtype", "needs loss scaling; set fp16=True"
    if config.main_grads_dtype is torch.bfloat16 and config.precision.params is not torch.bfloat16:
        yield "main_grads_dtype", "is allowed for bf16 parameters only; set bf16=True, or leave it out"
    if config.main_params_dtype is torch.float16 and config.precision.params is torch.float32:
        yield (
            "main_params_dtype",
            "is allowed for 16-bit parameters only, since fp32 parameters have no mains; set bf16=True or fp16=True, "
            "or leave it out",
        )
    if config.main_params_dtype is torch.int8 and config.precision.params is not torch.bfloat16:
        yield "main_params_dtype", "is an 8-bit remainder of bf16 parameters; set bf16=True, or leave it out"
    if config.main_params_dtype is torch.int8 and not config.store_param_remainders:
        yield "main_params_dtype", "is an 8-bit remainder, but store_param_remainders=False; set only one of them"


def _precision_aware(config: "OptimizerConfig") -> Iterator[Finding]:
    params = config.precision.params
    if not config.use_precision_aware_optimizer or params is torch.bfloat16:
        return
    if not config.store_param_remainders:
        yield (
            "store_param_remainders",
            f"has no effect: {params} parameters have no remainders; set bf16=True, or leave it at True",
        )
    if all(getattr(config, name) is torch.float32 for name in _NARROWER):
        names = _NARROWER[1:] if params is torch.float16 else _NARROWER[2:]
        yield (
            "use_precision_aware_optimizer",
            f"has no effect: nothing of {params} parameters is narrower; set {' or '.join(names)}, or leave it out",
        )


def _fp8(config: "OptimizerConfig") -> Iterator[Finding]:
    recipe = config.fp8_recipe
    if config.reuse_grad_buf_for_mxfp8_param_ag and recipe != "mxfp8":
        yield "reuse_grad_buf_for_mxfp8_param_ag", "needs fp8_recipe='mxfp8'; leave it out otherwise"
    if recipe is None:
        return
    if recipe == "nvfp4":
        yield "fp8_recipe", "4-bit parameters are not supported; use 'mxfp8', or keep them in bf16"
    if config.optimizer_cpu_offload:
        yield (
            "fp8_recipe",
            "excludes optimizer_cpu_offload: mains of fp8 parameters must stay on the device; set only one of them",
        )
    if config.main_params_dtype is not torch.float32:
        yield "main_params_dtype", "excludes fp8_recipe: mains of fp8 parameters are fp32; leave it out"
    if config.optimizer_cuda_graph:
        yield (
            "fp8_recipe",
            "excludes optimizer_cuda_graph: scales are exchanged between update and gather; set only one of them",
        )


def _shards(config: "OptimizerConfig") -> Iterator[Finding]:
    flat = config.use_distributed_optimizer
    whole = config.use_layer_wise_distributed_optimizer
    if flat and whole:
        yield (
            "use_distributed_optimizer",
            "excludes use_layer_wise_distributed_optimizer, which also shards the state; set only one of them",
        )
    if config.overlap_param_gather and not (flat or whole):
        yield (
            "overlap_param_gather",
            "needs sharded state; set use_distributed_optimizer or use_layer_wise_distributed_optimizer",
        )
    if config.overlap_param_gather_with_optimizer_step and config.optimizer_cuda_graph:
        yield (
            "overlap_param_gather_with_optimizer_step",
            "excludes optimizer_cuda_graph: a captured step is a single call; set only one of them",
        )
    if config.overlap_param_gather_with_optimizer_step and whole:
        yield (
            "overlap_param_gather_with_optimizer_step",
            "needs use_distributed_optimizer; layer-wise sharding already gathers bucket by bucket",
        )


def _averages(config: "OptimizerConfig") -> Iterator[Finding]:
    for name in config.averaged:
        if config.optimizer.lower() == "schedule_free":
            yield name, "excludes optimizer='schedule_free', which keeps an average of its own; set only one of them"
        if callable(config.averaged[name]) and config.optimizer_cuda_graph:
            yield name, "is a schedule, for which the host counts steps; graphs count them on the device: set a number"
        if config.optimizer_offload_compute == "device":
            yield (
                name,
                "excludes optimizer_offload_compute='device', as the host computes averages; set that to 'host'",
            )
