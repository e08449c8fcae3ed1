"""OptimizerConfig: the flat configuration its users know, checked when built, read through typed choices."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from opt_config.choices import (
    ConstantScale,
    DynamicScale,
    FlatShards,
    LossScaling,
    NoScale,
    OnDevice,
    OnHost,
    Placement,
    Precision,
    Replicated,
    Sharding,
    WholeParams,
)
from opt_config.files import Configuration
from opt_config.optimizer_rules import validate_optimizer_config


@dataclass
class OptimizerConfig(Configuration):
    """Configuration of an optimizer. Fields, order and defaults are those of Megatron-Core.

    Raises `ConfigError`, which names every field that is wrong, its value, what is allowed and what to do. After an
    assignment to a field, `validate()` checks again.

    >>> config = OptimizerConfig(lr=3e-4, bf16=True, use_distributed_optimizer=True)
    >>> config.sharding
    FlatShards(overlap_gather=False, overlap_gather_with_step=False)
    >>> OptimizerConfig(adam_beta1=1.5)
    Traceback (most recent call last):
    opt_config.errors.ConfigError: OptimizerConfig: adam_beta1=1.5: must be in [0, 1)
    """

    lr: float | None = None
    """Peak learning rate. None: the scheduler or the caller sets it."""
    min_lr: float | None = None
    """Learning rate below which no schedule goes."""
    decoupled_lr: float | None = None
    """Peak learning rate of embedding and output parameters; None: `lr`."""
    decoupled_min_lr: float | None = None
    """`min_lr` of embedding and output parameters; None: `min_lr`."""
    weight_decay: float = 0.01
    """Weight decay coefficient."""
    apply_wd_to_qk_layernorm: bool = False
    """Decay the weights of query and key layer norms, which one-dimensional parameters otherwise are spared."""

    fp8_recipe: str | None = None
    """The recipe of parameters that are kept in fp8: delayed, tensorwise, blockwise or mxfp8. None: none are."""
    fp16: bool = False
    """Parameters in fp16, with fp32 mains and loss scaling."""
    bf16: bool = False
    """Parameters in bf16, with fp32 mains."""
    reuse_grad_buf_for_mxfp8_param_ag: bool = False
    """Gather mxfp8 parameters through the gradient buffer."""
    params_dtype: torch.dtype = torch.float32
    """Dtype of the parameters where neither `fp16` nor `bf16` says it."""
    use_precision_aware_optimizer: bool = False
    """Allow narrower mains, gradients and moments: the five fields below."""
    store_param_remainders: bool = True
    """With bf16 parameters and fp32 mains, keep only the 16 bits of the mains that the parameter lacks."""
    main_grads_dtype: torch.dtype = torch.float32
    """Dtype in which gradients of bf16 parameters are summed over ranks and kept for the rule: float32 or bfloat16."""
    main_params_dtype: torch.dtype = torch.float32
    """Dtype of the mains of 16-bit parameters: float32, or float16 with a scale for each 128 elements."""
    exp_avg_dtype: torch.dtype = torch.float32
    """Dtype of the first moment: float32, float16, bfloat16 or uint8 (scaled fp8)."""
    exp_avg_sq_dtype: torch.dtype = torch.float32
    """Dtype of the second moment: float32, float16, bfloat16 or uint8 (scaled fp8)."""

    optimizer: str = "adam"
    """Name of the rule; `config_overrides` may name another one for some parameters."""

    loss_scale: float | None = None
    """A constant loss scale. None: dynamic scaling with fp16, no scaling otherwise."""
    initial_loss_scale: float = 2.0**32
    """Where dynamic scaling starts."""
    min_loss_scale: float = 1.0
    """Where dynamic scaling stops backing off."""
    loss_scale_window: float = 1000
    """Good steps before the dynamic scale grows."""
    hysteresis: int = 2
    """Overflows before the dynamic scale backs off."""

    adam_beta1: float = 0.9
    """Decay of Adam's first moment (and of SOAP's)."""
    adam_beta2: float = 0.999
    """Decay of Adam's second moment (and of SOAP's)."""
    adam_eps: float = 1e-08
    """Added to Adam's denominator."""
    decoupled_weight_decay: bool = True
    """Decay the weights beside the update (AdamW); False: add the decay to the gradient. Lion and SOAP only do the
    former, SGD only the latter."""
    sgd_momentum: float = 0.9
    """Momentum of SGD."""

    muon_momentum: float = 0.95
    """Momentum of Muon's gradient average."""
    muon_split_qkv: bool = True
    """Orthogonalise query, key and value of a fused QKV matrix one by one."""
    muon_nesterov: bool = False
    """Nesterov momentum in Muon."""
    muon_scale_mode: str = "spectral"
    """Scale of Muon's update by the matrix's shape (rows, cols): spectral, sqrt(max); unit_rms_norm and mup,
    sqrt(rows / cols); shape_scaling, sqrt(max(1, rows / cols)); match_rms_adamw, 0.2 sqrt(max)."""
    muon_fp32_matmul_prec: str = "medium"
    """Precision of the Newton-Schulz products: highest, high or medium, as torch names them."""
    muon_coefficient_type: str = "quintic"
    """Newton-Schulz coefficients."""
    muon_num_ns_steps: int = 5
    """Newton-Schulz steps."""
    muon_tp_mode: str = "blockwise"
    """What is orthogonalised of a tensor-parallel matrix: the local block (blockwise), or the whole, on every rank
    (duplicated) or together (distributed)."""
    muon_extra_scale_factor: float = 1.0
    """Multiplies Muon's update."""
    muon_scalar_optimizer: str = "adam"
    """The rule of what Muon leaves (embeddings, biases, norms): adam or lion."""

    lion_beta1: float = 0.95
    """Lion's interpolation between momentum and gradient."""
    lion_beta2: float = 0.98
    """Decay of Lion's momentum."""

    soap_shampoo_beta: float = 0.95
    """Decay of SOAP's preconditioner."""
    soap_precondition_frequency: int = 1
    """Steps between two updates of SOAP's basis."""
    soap_use_kl_shampoo: bool = True
    """SOAP's preconditioner by the Kullback-Leibler variant of Shampoo."""

    adaptive_muon_moment2_method: str = "adamuon"
    """Second moment of Adaptive Muon: adamuon, normuon or namo."""
    adaptive_muon_beta2: float = 0.95
    """Decay of Adaptive Muon's second moment."""
    adaptive_muon_eps: float = 1e-08
    """Added to Adaptive Muon's denominator."""

    use_distributed_optimizer: bool = False
    """Cut the state over data-parallel ranks (ZeRO-1)."""
    use_layer_wise_distributed_optimizer: bool = False
    """Deal whole matrices to data-parallel ranks, for rules that need them."""
    overlap_param_gather: bool = False
    """Gather parameters in the next forward, before use, instead of at the end of the step."""
    overlap_param_gather_with_optimizer_step: bool = False
    """Start the first model chunk's gather while the other chunks are stepped; refused where there is one chunk."""

    optimizer_cpu_offload: bool = False
    """Keep and update a part of the state on the host."""
    optimizer_offload_fraction: float = 0.0
    """Which part of the elements, in (0, 1]."""
    use_torch_optimizer_for_cpu_offload: bool = False
    """Update on the host by torch's optimizer."""
    overlap_cpu_optimizer_d2h_h2d: bool = False
    """Copy gradients and parameters while the host updates others."""
    pin_cpu_grads: bool = True
    """Pin the host's gradients."""
    pin_cpu_params: bool = True
    """Pin the host's parameters."""

    clip_grad: float = 1.0
    """Largest global L2 norm of the gradients; 0: no clipping."""
    log_num_zeros_in_grad: bool = False
    """Count the zeros among the gradients."""
    barrier_with_L1_time: bool = False
    """A barrier before each timer of level 1."""
    timers: Callable[..., Any] | None = None
    """`timers(name, log_level=...)` gives an object with `start(barrier=...)` and `stop()`."""
    config_logger_dir: str = ""
    """Directory for the resolved configuration, written by rank 0; empty: none is written."""
    optimizer_cuda_graph: bool = False
    """Capture the step as a CUDA graph, and replay it. Of the groups, numbers stay live and all else is captured again
    where it changes; every parameter needs a gradient in every step."""

    muon_use_syrk: bool = False
    """Compute Muon's Gram matrices by a kernel for symmetric products."""
    grad_norm_skip_threshold: float = math.inf
    """Skip the step when the gradients' norm is above this."""
    soap_order: str = "paper"
    """Order of SOAP's step: paper (update, factors, bases; the first step only finds the bases) or megatron (factors,
    bases, update; from the first step)."""
    soap_max_precond_dim: int | None = 10000
    """Longest side of a matrix for which SOAP keeps a factor; None: every side."""
    soap_one_sided: bool = False
    """SOAP keeps a factor of the shorter side only."""
    optimizer_options: Mapping[str, Any] | None = None
    """Numbers and choices of the rule named in `optimizer` that have no field here, such as {"alpha": 8.0} of ademamix,
    {"amsgrad": True} of adam, or {"exp_avg_slow_dtype": torch.bfloat16}; None: its defaults."""
    muon_weight_decay_method: str = "decoupled"
    """Muon's decay where decoupled_weight_decay: decoupled, lr wd p, or independent, wd p whatever the rate."""
    adaptive_muon_lines: str = "rows"
    """Lines of which normuon keeps a mean square: rows, cols, or longer: rows unless there are more columns."""

    def validate(self) -> None:
        """Check every field as it is now. Raises `ConfigError` with all that is wrong."""
        validate_optimizer_config(self)

    @property
    def precision(self) -> Precision:
        """In which numbers a step is kept."""
        params = torch.float16 if self.fp16 else torch.bfloat16 if self.bf16 else self.params_dtype
        return Precision(
            params=params,
            grads=self.main_grads_dtype,
            mains=self.main_params_dtype,
            exp_avg=self.exp_avg_dtype,
            exp_avg_sq=self.exp_avg_sq_dtype,
            remainder=(
                self.use_precision_aware_optimizer
                and self.store_param_remainders
                and params is torch.bfloat16
                and self.main_params_dtype is torch.float32
            ),
        )

    @property
    def sharding(self) -> Sharding:
        """Which part of the state lives on this rank."""
        if self.use_layer_wise_distributed_optimizer:
            return WholeParams(overlap_gather=self.overlap_param_gather)
        if self.use_distributed_optimizer:
            return FlatShards(
                overlap_gather=self.overlap_param_gather,
                overlap_gather_with_step=self.overlap_param_gather_with_optimizer_step,
            )
        return Replicated()

    @property
    def loss_scaling(self) -> LossScaling:
        """How the loss is scaled: a given `loss_scale` is kept, fp16 without one scales dynamically."""
        if self.loss_scale is not None:
            return ConstantScale(scale=self.loss_scale)
        if not self.fp16:
            return NoScale()
        return DynamicScale(
            initial=self.initial_loss_scale,
            minimum=self.min_loss_scale,
            window=self.loss_scale_window,
            hysteresis=self.hysteresis,
        )

    @property
    def placement(self) -> Placement:
        """Where mains and state live."""
        if not self.optimizer_cpu_offload:
            return OnDevice()
        return OnHost(
            fraction=self.optimizer_offload_fraction,
            overlap=self.overlap_cpu_optimizer_d2h_h2d,
            pin_grads=self.pin_cpu_grads,
            pin_params=self.pin_cpu_params,
        )


@dataclass
class AdamOptimizerConfig(OptimizerConfig):
    """An `OptimizerConfig` whose rule is Adam unless told otherwise."""

    optimizer: str = "adam"


@dataclass
class SGDOptimizerConfig(OptimizerConfig):
    """An `OptimizerConfig` whose rule is SGD unless told otherwise."""

    optimizer: str = "sgd"
