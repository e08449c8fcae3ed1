"""Names of other libraries, and what to write here instead: fields, sections, and values of fields.

A field is listed by its name, a value as FIELD=VALUE, and a section of a configuration file as FIELD={}. The guide
"Coming from another library" shows this table.
"""

from collections.abc import Mapping
from types import MappingProxyType

_SCHEDULE = "opt_scheduler.OptimizerParamScheduler takes it"
_CURVE = "opt_scheduler.get_schedule takes the schedule by name"
_WARMUP = "pass warmup_steps to opt_scheduler.get_schedule, in steps"
_OFFLOAD = "set optimizer_cpu_offload=True and optimizer_offload_fraction"
_FUSED = "steps are always fused; leave it out"
_CODES = 'optimizer_options={"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8}'
_DYNAMIC = "leave it out for dynamic loss scaling with fp16=True"
_LOADER = "your data loader decides it; leave it out"
_NOT_OURS = "nothing here needs it; leave it out"

_TORCH = {
    "learning_rate learningrate": "set lr",
    "wd": "set weight_decay",
    "optim optimizer_type optimizer_name": "set optimizer",
    "betas": "set adam_beta1 and adam_beta2",
    "beta1": "set adam_beta1",
    "beta2": "set adam_beta2",
    "eps adam_epsilon": "set adam_eps",
    "momentum": "set sgd_momentum, or muon_momentum for Muon",
    "max_norm max_grad_norm gradient_clip_val gradient_clipping": "set clip_grad",
    "fused foreach implementation": _FUSED,
    "capturable": "set optimizer_cuda_graph=True",
    "amsgrad maximize alpha": 'pass it in optimizer_options, such as {"amsgrad": True}',
    "nesterov": "set muon_nesterov; for SGD, pass it in optimizer_options",
    "ns_steps": "set muon_num_ns_steps",
    "early_step_in_backward": "call opt_stack.release_gradients(optimizer)",
}
_TORCHTITAN = {
    "decay_ratio decay_type min_lr_factor": 'pass it to opt_scheduler.get_schedule("torchtitan", ...)',
}
_HUGGING_FACE = {
    "lr_scheduler_type lr_scheduler lr_scheduler_kwargs scheduler_type": _CURVE,
    "warmup_ratio warmup_steps num_warmup_steps": _WARMUP,
    "optim_args": "pass it in optimizer_options",
    "per_device_train_batch_size": _LOADER,
    "optimizer=adamw_torch optimizer=adamw_torch_fused optimizer=adamw_hf optimizer=adamw_apex_fused": (
        'set optimizer="adam"; steps are always fused'
    ),
}
_EIGHT_BIT = {
    "optim_bits block_wise min_8bit_size": (
        "set use_precision_aware_optimizer=True with exp_avg_dtype and exp_avg_sq_dtype=torch.uint8 (scaled fp8), "
        'or optimizer_options={"exp_avg_dtype": torch.int8} for codes with a scale per block'
    ),
    "is_paged paged": _OFFLOAD,
    "percentile_clipping": "set clip_grad, or grad_norm_skip_threshold to skip a step",
    "bf16_stochastic_round": "leave it out: main values are kept (only opt_kernels' drop-in optimizers round so)",
    "optimizer=adamw_bnb_8bit optimizer=adamw_8bit optimizer=adamw8bit optimizer=adam8bit": (
        f'set optimizer="adam" and {_CODES}'
    ),
    "optimizer=paged_adamw_8bit optimizer=pagedadamw8bit": (
        f'set optimizer="adam", {_CODES}, optimizer_cpu_offload=True and optimizer_offload_fraction'
    ),
    "optimizer=paged_adamw_32bit optimizer=paged_adamw optimizer=pagedadamw": (
        'set optimizer="adam", optimizer_cpu_offload=True and optimizer_offload_fraction'
    ),
    "optimizer=lion_8bit optimizer=lion8bit": (
        'set optimizer="lion" and optimizer_options={"exp_avg_dtype": torch.int8}'
    ),
    "optimizer=lion_32bit": 'set optimizer="lion"',
}
_DEEPSPEED = {
    "zero zero_stage stage zero_optimization": (
        "set use_distributed_optimizer=True for stage 1; for stages 2 and 3, shard the model with torch's fully_shard"
    ),
    "offload_optimizer cpu_offload": _OFFLOAD,
    "pin_memory": "set pin_cpu_grads and pin_cpu_params",
    "initial_scale_power": "set initial_loss_scale=2.0**power",
    "reduce_bucket_size allgather_bucket_size": "set DistributedDataParallelConfig.bucket_size",
    "overlap_comm": "set overlap_grad_reduce in DistributedDataParallelConfig",
    "gradient_accumulation_steps": "call backward several times before step; see no_sync of the wrapper",
    "scheduler": 'pass its type and params to opt_scheduler.get_schedule: "WarmupLR", "WarmupDecayLR"',
    "warmup_num_steps warmup_min_lr warmup_max_lr warmup_type total_num_steps": (
        'pass it to opt_scheduler.get_schedule("WarmupDecayLR", ...)'
    ),
    "train_batch_size train_micro_batch_size_per_gpu": _LOADER,
    "steps_per_print wall_clock_breakdown contiguous_gradients allgather_partitions": _NOT_OURS,
    "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer": _NOT_OURS,
    "loss_scale=0 loss_scale=0.0 loss_scale=dynamic": _DYNAMIC,
    "fp16={}": (
        "set fp16=True, and the section's loss_scale_window, hysteresis and min_loss_scale as fields; "
        "initial_loss_scale=2.0**initial_scale_power"
    ),
    "bf16={}": "set bf16=True",
    "optimizer={}": 'set optimizer="adam", lr, adam_beta1, adam_beta2, adam_eps and weight_decay from its params',
    "optimizer=fusedadam optimizer=deepspeedcpuadam": 'set optimizer="adam"; steps are always fused',
}
_MEGATRON = {
    "bucket_size overlap_grad_reduce grad_reduce_in_fp32 check_for_nan_in_grad": (
        "set it in DistributedDataParallelConfig"
    ),
    "lr_decay_style lr_warmup_steps lr_decay_steps start_wd end_wd": _SCHEDULE,
    "lr_warmup_iters lr_decay_iters lr_wsd_decay_iters": f"{_SCHEDULE} in steps",
}
WORDS_BY_LIBRARY: Mapping[str, Mapping[str, str]] = {
    "torch": _TORCH,
    "torchtitan": _TORCHTITAN,
    "Hugging Face": _HUGGING_FACE,
    "bitsandbytes, torchao": _EIGHT_BIT,
    "DeepSpeed": _DEEPSPEED,
    "Megatron-LM": _MEGATRON,
}
"""By library: words that share an answer, separated by spaces, and the answer."""

FOREIGN_WORDS: Mapping[str, str] = MappingProxyType(
    {word: answer for table in WORDS_BY_LIBRARY.values() for words, answer in table.items() for word in words.split()}
)


def foreign_value(field: str, value: object) -> str:
    """Return what to write instead of another library's value of a field; empty if the value is not one of these.

    >>> foreign_value("loss_scale", 0)
    'leave it out for dynamic loss scaling with fp16=True'
    """
    spelling = "{}" if isinstance(value, Mapping) else str(value).lower().replace("-", "_")
    return FOREIGN_WORDS.get(f"{field}={spelling}", "")
