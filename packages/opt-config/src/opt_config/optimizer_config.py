"""OptimizerConfig: Megatron-Core's flat configuration, validated when built, with typed views of its fields."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from opt_config import choices
from opt_config.conflicts import AVERAGED, conflicts, field_problems
from opt_config.errors import check
from opt_config.files import Configuration


@dataclass
class OptimizerConfig(Configuration):
    """Configuration of an optimizer. Fields, order and defaults are those of Megatron-Core; newer ones follow.

    Raises `ConfigError`, which names every invalid field, its value, what is allowed and what to do. Call `validate()`
    to check again after assigning to a field.

    >>> config = OptimizerConfig(lr=3e-4, bf16=True, use_distributed_optimizer=True)
    >>> config.sharding
    FlatShards(overlap_gather=False, overlap_gather_with_step=False)
    >>> OptimizerConfig(adam_beta1=1.5)
    Traceback (most recent call last):
    opt_config.errors.ConfigError: OptimizerConfig: adam_beta1=1.5: must be in [0, 1)
    """

    lr: float | None = None
    """Peak learning rate. None: set by the scheduler or the caller."""
    min_lr: float | None = None
    """Lower bound of the scheduled learning rate."""
    decoupled_lr: float | None = None
    """Peak learning rate of embedding and output parameters. None: `lr`."""
    decoupled_min_lr: float | None = None
    """Lower bound of the learning rate of embedding and output parameters. None: `min_lr`."""
    weight_decay: float = 0.01
    """Weight decay coefficient."""
    apply_wd_to_qk_layernorm: bool = False
    """Apply weight decay to query and key layer norms. Other one-dimensional parameters have none."""

    fp8_recipe: str | None = None
    """Recipe of parameters kept in fp8: delayed, tensorwise, blockwise or mxfp8. None: no parameter is in fp8."""
    fp16: bool = False
    """Parameters in fp16, with fp32 main parameters (mains) and loss scaling."""
    bf16: bool = False
    """Parameters in bf16, with fp32 main parameters (mains)."""
    reuse_grad_buf_for_mxfp8_param_ag: bool = False
    """Gather mxfp8 parameters through the gradient buffer."""
    params_dtype: torch.dtype = torch.float32
    """Dtype of the parameters if neither `fp16` nor `bf16` is set."""
    use_precision_aware_optimizer: bool = False
    """Allow narrower mains, gradients and moments, as chosen by the five fields below, which need it. Refused if none
    of them has an effect."""
    store_param_remainders: bool = True
    """With bf16 parameters, fp32 mains and `use_precision_aware_optimizer`, store only the low 16 bits of the mains.
    The parameter is the upper half."""
    main_grads_dtype: torch.dtype = torch.float32
    """Dtype in which gradients of bf16 parameters are reduced over ranks and read by the rule: float32 or bfloat16."""
    main_params_dtype: torch.dtype = torch.float32
    """Dtype of the mains of 16-bit parameters: float32, float16 with one scale per 128 elements, or int8: a bf16
    parameter with 8 more bits, which is a main value of 24 bits."""
    exp_avg_dtype: torch.dtype = torch.float32
    """Dtype of the first moment: float32, float16, bfloat16 or uint8 (scaled fp8)."""
    exp_avg_sq_dtype: torch.dtype = torch.float32
    """Dtype of the second moment: float32, float16, bfloat16 or uint8 (scaled fp8)."""

    optimizer: str = "adam"
    """Name of the rule; "adamw" becomes "adam", which needs decoupled_weight_decay=True. `config_overrides` may choose
    another rule for some parameters."""

    loss_scale: float | None = None
    """Constant loss scale. None: dynamic scaling with fp16, no scaling otherwise."""
    initial_loss_scale: float = 2.0**32
    """Initial loss scale of dynamic scaling."""
    min_loss_scale: float = 1.0
    """Lower bound of the dynamic loss scale."""
    loss_scale_window: float = 1000
    """Successful steps before the dynamic loss scale grows."""
    hysteresis: int = 2
    """Overflows before the dynamic loss scale is reduced."""

    adam_beta1: float = 0.9
    """Decay of Adam's first moment (and of SOAP's)."""
    adam_beta2: float = 0.999
    """Decay of Adam's second moment (and of SOAP's)."""
    adam_eps: float = 1e-08
    """Added to Adam's denominator."""
    decoupled_weight_decay: bool = True
    """Decay the weights separately from the update (AdamW). False: add the decay to the gradient. Lion and SOAP support
    only True; SGD always adds it to the gradient."""
    sgd_momentum: float = 0.9
    """Momentum of SGD."""

    muon_momentum: float = 0.95
    """Momentum of Muon."""
    muon_split_qkv: bool = True
    """Orthogonalise query, key and value of a fused QKV matrix separately. For SOAP: soap_split_qkv."""
    muon_nesterov: bool = False
    """Nesterov momentum in Muon."""
    muon_scale_mode: str = "spectral"
    """Scale of Muon's update by the matrix's shape (rows, cols): spectral, sqrt(max); unit_rms_norm and mup,
    sqrt(rows / cols); shape_scaling, sqrt(max(1, rows / cols)); match_rms_adamw, 0.2 sqrt(max)."""
    muon_fp32_matmul_prec: str = "medium"
    """Precision of the fp32 matrix products of Newton-Schulz: highest, high or medium, as in
    `torch.set_float32_matmul_precision`."""
    muon_coefficient_type: str = "quintic"
    """Name of the set of Newton-Schulz coefficients."""
    muon_num_ns_steps: int = 5
    """Number of Newton-Schulz steps."""
    muon_tp_mode: str = "blockwise"
    """How a tensor-parallel matrix is orthogonalised: the local block only, so that updates depend on the number of
    tensor-parallel ranks (blockwise), the whole matrix on one rank (duplicated or layer_sharded, two names of one
    mode), or the whole matrix with its work divided over the ranks (distributed). No effect without tensor
    parallelism."""
    muon_extra_scale_factor: float = 1.0
    """Factor of Muon's update."""
    muon_scalar_optimizer: str = "adam"
    """Rule of the parameters that Muon does not update (embeddings, biases, norms): adam or lion."""

    lion_beta1: float = 0.95
    """Interpolation between momentum and gradient in Lion's update."""
    lion_beta2: float = 0.98
    """Decay of Lion's momentum."""

    soap_shampoo_beta: float = 0.95
    """Decay of SOAP's preconditioner."""
    soap_precondition_frequency: int = 1
    """Number of steps from one update of SOAP's basis to the next."""
    soap_use_kl_shampoo: bool = True
    """Use the Kullback-Leibler variant of Shampoo for SOAP's preconditioner. `soap_muon` always uses plain factors."""

    adaptive_muon_moment2_method: str = "adamuon"
    """Second moment of Adaptive Muon: adamuon, normuon or namo."""
    adaptive_muon_beta2: float = 0.95
    """Decay of Adaptive Muon's second moment."""
    adaptive_muon_eps: float = 1e-08
    """Added to Adaptive Muon's denominator."""

    use_distributed_optimizer: bool = False
    """Shard the optimizer state over data-parallel ranks (ZeRO-1)."""
    use_layer_wise_distributed_optimizer: bool = False
    """Assign whole matrices to data-parallel ranks, for rules that need whole matrices."""
    overlap_param_gather: bool = False
    """Gather parameters in the next forward pass, before they are used, instead of at the end of the step."""
    overlap_param_gather_with_optimizer_step: bool = False
    """Gather the parameters of the first model chunk while the other chunks are updated. Needs two or more chunks."""

    optimizer_cpu_offload: bool = False
    """Keep a part of the optimizer state in host memory, and update it where `optimizer_offload_compute` says."""
    optimizer_offload_fraction: float = 0.0
    """Fraction of the elements that are offloaded, in (0, 1]."""
    use_torch_optimizer_for_cpu_offload: bool = False
    """Update offloaded parameters with the optimizer of torch.optim."""
    overlap_cpu_optimizer_d2h_h2d: bool = False
    """Overlap copies between device and host with the update on the host."""
    pin_cpu_grads: bool = True
    """Keep offloaded gradients in pinned memory."""
    pin_cpu_params: bool = True
    """Keep offloaded parameters in pinned memory."""

    clip_grad: float = 1.0
    """Clip gradients to this global L2 norm. 0: no clipping."""
    grad_norm_skip_threshold: float = math.inf
    """Skip the step if the gradient norm is above this."""
    log_num_zeros_in_grad: bool = False
    """Count the gradient elements that are zero."""
    barrier_with_L1_time: bool = False
    """Synchronize the ranks by a barrier before each timer of level 1. Needs `timers` when the optimizer is built."""
    timers: Callable[..., Any] | None = None
    """Callable: `timers(name, log_level=...)` returns an object with `start(barrier=...)` and `stop()`."""
    config_logger_dir: str = ""
    """Directory to which rank 0 writes the resolved configuration. Empty: nothing is written."""
    optimizer_cuda_graph: bool = False
    """Capture the step as a CUDA graph and replay it. Numbers changed in parameter groups take effect at the next
    replay; any other change of a group captures the step again. Every parameter needs a gradient in every step."""

    muon_use_syrk: bool = False
    """Compute the Gram matrices of Muon with a kernel for symmetric products."""
    soap_order: str = "paper"
    """Order within a step of SOAP: paper (update, factors, bases; the first step only initializes the bases) or
    megatron (factors, bases, update; updates from the first step)."""
    soap_max_precond_dim: int | None = 10000
    """Largest dim of a matrix for which SOAP keeps a factor. None: no limit."""
    soap_one_sided: bool = False
    """Let SOAP keep a factor of the smaller dim only."""
    soap_split_qkv: bool = False
    """Keep factors of query, key and value of a fused QKV matrix separately in SOAP. False: of the whole matrix, as in
    Megatron-Core."""
    optimizer_options: Mapping[str, Any] | None = None
    """Hyper-parameters and options of the rule named in `optimizer` that have no field here, such as {"alpha": 8.0} of
    ademamix, {"amsgrad": True} of adam, or {"exp_avg_slow_dtype": torch.bfloat16}. With Muon and SOAP: of the rule that
    updates the other parameters, such as {"exp_avg_dtype": torch.int8} for 8-bit codes. None: its defaults."""
    muon_weight_decay_method: str = "decoupled"
    """Weight decay of Muon with `decoupled_weight_decay`: decoupled (lr * wd * p) or independent (wd * p)."""
    adaptive_muon_lines: str = "rows"
    """Lines of a matrix of which normuon keeps the mean square: rows, cols, or longer (rows unless cols > rows)."""
    muon_pre_norm: str = "none"
    """What Muon's momentum is divided by before Newton-Schulz: none, or rows, each row by its norm (MuonEq)."""
    muon_post_norm: str = "none"
    """How Muon's orthogonalised update is normalised (Muon+): none; frobenius, to the norm of an orthogonal matrix;
    rows or cols, each to norm 1; rows_cols or cols_rows, one after the other."""
    muon_nuclear_scale: bool = False
    """Multiply Muon's orthogonalised update by the nuclear norm of the momentum (PolarGrad)."""
    optimizer_offload_compute: str = "host"
    """Where offloaded state is updated: host, or device, to which it is fetched run by run, at most two at a time."""
    skip_sigma: float = math.inf
    """Skip the step if its gradient norm, or its loss (`optimizer.note_loss`), is above the mean of the last
    `skip_window` steps by more than this many standard deviations. The deviation counts as at least 1 % of the mean.
    6 is usual. Applies in addition to `grad_norm_skip_threshold`: a step must pass both."""
    skip_window: int = 128
    """Number of steps whose norms and losses `skip_sigma` compares with, at least 2. No step is skipped before half of
    them have been made, nor after that many have been skipped in a row."""
    ema_decay: float | Mapping[str, float] | Callable[[int], float] | None = None
    """Decay of an exponential moving average of the weights, which `optimizer.eval()` shows: a number in [0, 1), or a
    schedule, a function of the number of the step, from 1. {"half_life": 0.05, "num_steps": 20000}: the decay whose
    half-life is this fraction of a training of so many steps. None: no average. A number is an entry of the parameter
    groups, for which `opt_scheduler.FieldScheduler` takes a schedule, too."""
    ema_from_step: int = 1
    """The step after which the average begins as a copy of the weights."""
    ema_share: float = 1.0
    """Share of the average in the weights that `optimizer.eval()` shows, in (0, 1]: (1 - share) * weights + share *
    average."""
    ema_nesterov_beta: float | None = None
    """EMA-Nesterov: take gradients ahead of the weights, by this factor of an average of the changes that steps make: a
    number in [0, 1), an entry of the parameter groups like `ema_decay`. None: gradients are taken at the weights."""
    ema_nesterov_gamma: float = 0.99
    """Decay of EMA-Nesterov's average of the changes."""

    def __post_init__(self) -> None:
        """Check all fields. Raises `ConfigError` with every problem."""
        super().__post_init__()
        if self.optimizer.lower() == "adamw":
            self.optimizer = "adam"

    def validate(self) -> None:
        """Check the current values of all fields. Raises `ConfigError` with every problem."""
        check(self, field_problems, conflicts)

    @property
    def precision(self) -> choices.Precision:
        """Dtypes of parameters, gradients, mains and moments."""
        params = torch.float16 if self.fp16 else torch.bfloat16 if self.bf16 else self.params_dtype
        has_remainders = self.use_precision_aware_optimizer and self.store_param_remainders
        is_split = params is torch.bfloat16 and self.main_params_dtype is torch.float32
        return choices.Precision(
            params=params,
            grads=self.main_grads_dtype,
            mains=self.main_params_dtype,
            exp_avg=self.exp_avg_dtype,
            exp_avg_sq=self.exp_avg_sq_dtype,
            remainder=has_remainders and is_split,
        )

    @property
    def sharding(self) -> choices.Sharding:
        """Which part of the optimizer state this rank keeps."""
        if self.use_layer_wise_distributed_optimizer:
            by_owner = self.muon_tp_mode in ("duplicated", "layer_sharded")
            return choices.WholeParams(overlap_gather=self.overlap_param_gather, by_owner=by_owner)
        if self.use_distributed_optimizer:
            return choices.FlatShards(
                overlap_gather=self.overlap_param_gather,
                overlap_gather_with_step=self.overlap_param_gather_with_optimizer_step,
            )
        return choices.Replicated()

    @property
    def loss_scaling(self) -> choices.LossScaling:
        """How the loss is scaled: by `loss_scale` if it is set, else dynamically with fp16, else not at all."""
        if self.loss_scale is not None:
            return choices.ConstantScale(scale=self.loss_scale)
        if not self.fp16:
            return choices.NoScale()
        return choices.DynamicScale(
            initial=self.initial_loss_scale,
            minimum=self.min_loss_scale,
            window=self.loss_scale_window,
            hysteresis=self.hysteresis,
        )

    @property
    def placement(self) -> choices.Placement:
        """Where mains and state are kept."""
        if not self.optimizer_cpu_offload:
            return choices.OnDevice()
        return choices.OnHost(
            fraction=self.optimizer_offload_fraction,
            overlap=self.overlap_cpu_optimizer_d2h_h2d,
            pin_grads=self.pin_cpu_grads,
            pin_params=self.pin_cpu_params,
            compute=self.optimizer_offload_compute,
        )

    @property
    def elementwise_optimizer(self) -> str:
        """The rule that reads `optimizer_options`: `optimizer`, or if that is a matrix rule of this stack, the rule of
        the parameters that it does not update."""
        if self.optimizer in choices.MUON_FAMILY:
            return self.muon_scalar_optimizer
        return "adam" if self.optimizer in choices.MATRIX_RULES else self.optimizer

    @property
    def averaged(self) -> dict[str, Any]:
        """The numbers of the averages of the weights, or a schedule, by field: `ema_decay` and `ema_nesterov_beta`."""
        numbers = {name: getattr(self, name) for name in AVERAGED if getattr(self, name) is not None}
        decay = self.ema_decay
        if isinstance(decay, Mapping):
            numbers["ema_decay"] = 0.5 ** (1 / (decay["half_life"] * decay["num_steps"]))
        return numbers


@dataclass
class AdamOptimizerConfig(OptimizerConfig):
    """An `OptimizerConfig` whose rule is Adam by default."""


@dataclass
class SGDOptimizerConfig(OptimizerConfig):
    """An `OptimizerConfig` whose rule is SGD by default."""

    optimizer: str = "sgd"


def load_config(path: str | Path, *, section: str = "") -> OptimizerConfig:
    """Return an `OptimizerConfig` from a JSON, TOML or YAML file; see `OptimizerConfig.load`. Raises `ConfigError`."""
    return OptimizerConfig.load(path, section=section)
