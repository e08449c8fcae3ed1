"""ConfigError: reports every problem of a configuration at once, each with what is allowed and what to do."""

import difflib
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self


def is_too_large(value: float) -> bool:
    """Whether a number is an int beyond the range of floats."""
    try:
        float(value)
    except OverflowError:
        return True
    return False


class Problem(NamedTuple):
    """One thing wrong with one field."""

    field: str
    value: object
    reason: str  # what is allowed, what to do

    def __str__(self) -> str:
        is_long = isinstance(self.value, int) and is_too_large(self.value)
        shown = "an int of hundreds of digits" if is_long else repr(self.value)
        return f"{self.field}={shown}: {self.reason}"


class ConfigError(ValueError):
    """An invalid configuration, or one that asks for something that is not available.

    `problems` holds every problem, not only the first. It is empty if the error is not about fields.
    """

    problems: tuple[Problem, ...] = ()

    @classmethod
    def of(cls, owner: str, problems: Sequence[Problem]) -> Self:
        """One error for all `problems` of the object called `owner`."""
        if len(problems) == 1:
            message = f"{owner}: {problems[0]}"
        else:
            message = "\n".join([f"{owner}: {len(problems)} problems", *(f"  {problem}" for problem in problems)])
        return cls._with(message, problems)

    def within(self, place: str) -> Self:
        """The same error, its message preceded by `place`, such as the path of a file."""
        return self._with(f"{place}: {self}", self.problems)

    @classmethod
    def _with(cls, message: str, problems: Sequence[Problem]) -> Self:
        error = cls(message)
        error.problems = tuple(problems)
        return error


class UnknownFieldError(ConfigError, TypeError):
    """An unknown field name passed as a keyword. Also a TypeError, as for any unexpected keyword argument."""


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """A sentence that suggests the names in `known` closest to `given`; empty if none is close.

    >>> did_you_mean("adam_beta_1", ["adam_beta1", "lr"])
    ' Did you mean adam_beta1?'
    >>> did_you_mean("colour", ["adam_beta1", "lr"])
    ''
    """
    spelling = {name.lower(): name for name in known}
    close = difflib.get_close_matches(given.lower(), spelling, n=2, cutoff=0.6)
    return f" Did you mean {' or '.join(spelling[name] for name in close)}?" if close else ""


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
    "bf16_stochastic_round": "leave it out: main values are kept (only opt_kernels' drop-in optimizers round so)",
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
