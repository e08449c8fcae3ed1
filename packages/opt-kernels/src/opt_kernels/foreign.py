"""Names of bitsandbytes, torchao and DeepSpeed, and what to write here instead: arguments, and optimizers."""

from collections.abc import Mapping
from types import MappingProxyType

_CODES = "exp_avg_dtype=torch.int8, exp_avg_sq_dtype=torch.uint8"
_FP8 = "exp_avg_dtype=torch.float8_e4m3fn, exp_avg_sq_dtype=torch.float8_e4m3fn"
_PAGED = "optimizer_cpu_offload=True of opt_stack.get_optimizer keeps states on the host"

ARGUMENTS: Mapping[str, str] = MappingProxyType(
    {
        "optim_bits": f"{_CODES} keep 8-bit states",
        "min_8bit_size": "states of all sizes are coded; build a second optimizer for small tensors",
        "is_paged": _PAGED,
        "block_wise": "8-bit states always have a scale per block; leave it out",
        "block_size": "8-bit states have a scale per block of 128; leave it out",
        "ema_decay": "opt_stack.get_optimizer averages weights; here, put torch's AveragedModel around the model",
        "ema_nesterov_beta": "opt_stack.get_optimizer looks ahead; here, an evaluation would not know of it",
        "percentile_clipping": "max_norm clips the total norm",
        "bf16_stochastic_round": "stochastic_rounding=True does the same",
        "adam_w_mode": "AdamW decouples weight decay, and Adam does not",
        "adamw_mode": "AdamW decouples weight decay, and Adam does not",
        "set_grad_none": "zero_grad() sets gradients to None",
    }
)

_CLASSES = {
    "Adam8bit": f"opt_kernels.Adam(params, {_CODES})",
    "AdamW8bit": f"opt_kernels.AdamW(params, {_CODES})",
    "AdamFp8": f"opt_kernels.Adam(params, {_FP8})",
    "AdamWFp8": f"opt_kernels.AdamW(params, {_FP8})",
    "Lion8bit": "opt_kernels.Lion(params, exp_avg_dtype=torch.int8)",
    "SGD8bit": "opt_kernels.SGD(params, momentum=0.9, momentum_buffer_dtype=torch.int8)",
    "FusedAdam": "opt_kernels.AdamW, or Adam for adam_w_mode=False",
    "DeepSpeedCPUAdam": "opt_kernels.AdamW, which runs on CPUs too",
}
_ON_PAGES = {
    **{f"Paged{name}": f"{_CLASSES[name]}; {_PAGED}" for name in ("Adam8bit", "AdamW8bit", "Lion8bit")},
    **{f"Paged{name}": f"opt_kernels.{name}; {_PAGED}" for name in ("Adam", "AdamW", "Lion")},
}
CLASSES: Mapping[str, str] = MappingProxyType(_CLASSES | _ON_PAGES)
