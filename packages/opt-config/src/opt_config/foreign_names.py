"""Names that torch, trainers, bitsandbytes, DeepSpeed and Megatron use for what a field here does."""

from collections.abc import Iterable

from opt_config.errors import did_you_mean

_ADAM = "set adam_beta1 and adam_beta2"
_NARROW = "set use_precision_aware_optimizer=True with exp_avg_dtype and exp_avg_sq_dtype=torch.uint8 (scaled fp8), or"
_EIGHT_BITS = f'{_NARROW} optimizer_options={{"exp_avg_dtype": torch.int8}} for codes with a scale per block'
_FUSED = "steps are always fused; leave it out"
_OPTION = 'pass it in optimizer_options, such as {"amsgrad": True}'
_DDP = "set it in DistributedDataParallelConfig"
_SCHEDULE = "opt_scheduler.OptimizerParamScheduler takes it"
_ZERO = "set use_distributed_optimizer=True for stage 1; for stages 2 and 3, shard the model with torch's fully_shard"

_ANSWERS: dict[str, str] = {
    **dict.fromkeys(("learning_rate", "learningrate"), "set lr"),
    "wd": "set weight_decay",
    **dict.fromkeys(("optim", "optimizer_type", "optimizer_name"), "set optimizer"),
    "betas": _ADAM, "beta1": "set adam_beta1", "beta2": "set adam_beta2", "eps": "set adam_eps",
    "momentum": "set sgd_momentum, or muon_momentum for Muon",
    **dict.fromkeys(("max_norm", "max_grad_norm", "gradient_clip_val", "gradient_clipping"), "set clip_grad"),
    **dict.fromkeys(("fused", "foreach"), _FUSED),
    "capturable": "set optimizer_cuda_graph=True",
    **dict.fromkeys(("amsgrad", "maximize", "alpha"), _OPTION),
    "nesterov": "set muon_nesterov; for SGD, pass it in optimizer_options",
    "ns_steps": "set muon_num_ns_steps",
    # bitsandbytes and torchao
    **dict.fromkeys(("optim_bits", "block_wise", "min_8bit_size"), _EIGHT_BITS),
    **dict.fromkeys(("is_paged", "paged"), "set optimizer_cpu_offload=True and optimizer_offload_fraction"),
    "percentile_clipping": "set clip_grad, or grad_norm_skip_threshold to skip a step",
    "bf16_stochastic_round": 'pass optimizer_options={"stochastic_rounding": True}',
    # DeepSpeed
    **dict.fromkeys(("zero", "zero_stage", "stage", "zero_optimization"), _ZERO),
    **dict.fromkeys(
        ("offload_optimizer", "cpu_offload"), "set optimizer_cpu_offload=True and optimizer_offload_fraction"
    ),
    "pin_memory": "set pin_cpu_grads and pin_cpu_params",
    "initial_scale_power": "set initial_loss_scale=2.0**power",
    **dict.fromkeys(("reduce_bucket_size", "allgather_bucket_size"), "set DistributedDataParallelConfig.bucket_size"),
    "overlap_comm": "set overlap_grad_reduce in DistributedDataParallelConfig",
    "gradient_accumulation_steps": "call backward several times before step; see no_sync of the wrapper",
    # Megatron's other arguments
    **dict.fromkeys(("bucket_size", "overlap_grad_reduce", "grad_reduce_in_fp32", "check_for_nan_in_grad"), _DDP),
    **dict.fromkeys(("lr_decay_style", "lr_warmup_steps", "lr_decay_steps", "start_wd", "end_wd"), _SCHEDULE),
    **dict.fromkeys(("lr_warmup_iters", "lr_decay_iters", "lr_wsd_decay_iters"), f"{_SCHEDULE} in steps"),
}  # fmt: skip


def unknown_field(name: str, known: Iterable[str]) -> str:
    """Return why a field is refused: what to write instead of another library's name, or the closest field.

    >>> unknown_field("betas", ["adam_beta1", "lr"])
    'unknown field; set adam_beta1 and adam_beta2.'
    >>> unknown_field("adam_beta_1", ["adam_beta1", "lr"])
    'unknown field. Did you mean adam_beta1?'
    """
    known = list(known)
    answer = _ANSWERS.get(name.lower().lstrip("-").replace("-", "_"))
    if answer is None or ("DistributedData" in answer and "bucket_size" in known):
        return f"unknown field.{did_you_mean(name, known)}"
    return f"unknown field; {answer}."
