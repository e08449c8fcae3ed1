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
        """Return one error for all `problems` of the object called `owner`."""
        if len(problems) == 1:
            message = f"{owner}: {problems[0]}"
        else:
            message = "\n".join([f"{owner}: {len(problems)} problems", *(f"  {problem}" for problem in problems)])
        return cls._with(message, problems)

    def within(self, place: str) -> Self:
        """Return the same error, its message preceded by `place`, such as the path of a file."""
        return self._with(f"{place}: {self}", self.problems)

    @classmethod
    def _with(cls, message: str, problems: Sequence[Problem]) -> Self:
        error = cls(message)
        error.problems = tuple(problems)
        return error


class UnknownFieldError(ConfigError, TypeError):
    """An unknown field name passed as a keyword. Also a TypeError, as for any unexpected keyword argument."""


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return a sentence that suggests the names in `known` closest to `given`; empty if none is close.

    >>> did_you_mean("adam_beta_1", ["adam_beta1", "lr"])
    ' Did you mean adam_beta1?'
    >>> did_you_mean("colour", ["adam_beta1", "lr"])
    ''
    """
    spelling = {name.lower(): name for name in known}
    close = difflib.get_close_matches(given.lower(), spelling, n=2, cutoff=0.6)
    return f" Did you mean {' or '.join(spelling[name] for name in close)}?" if close else ""


_SCHEDULE = "opt_scheduler.OptimizerParamScheduler takes it"
_OFFLOAD = "set optimizer_cpu_offload=True and optimizer_offload_fraction"

_ANSWERS: dict[str, str] = {}


def _answer(names: str, answer: str) -> None:
    _ANSWERS.update(dict.fromkeys(names.split(), answer))


_answer("learning_rate learningrate", "set lr")
_answer("wd", "set weight_decay")
_answer("optim optimizer_type optimizer_name", "set optimizer")
_answer("betas", "set adam_beta1 and adam_beta2")
_answer("beta1", "set adam_beta1")
_answer("beta2", "set adam_beta2")
_answer("eps", "set adam_eps")
_answer("momentum", "set sgd_momentum, or muon_momentum for Muon")
_answer("max_norm max_grad_norm gradient_clip_val gradient_clipping", "set clip_grad")
_answer("fused foreach", "steps are always fused; leave it out")
_answer("capturable", "set optimizer_cuda_graph=True")
_answer("amsgrad maximize alpha", 'pass it in optimizer_options, such as {"amsgrad": True}')
_answer("nesterov", "set muon_nesterov; for SGD, pass it in optimizer_options")
_answer("ns_steps", "set muon_num_ns_steps")
# bitsandbytes and torchao
_answer(
    "optim_bits block_wise min_8bit_size",
    "set use_precision_aware_optimizer=True with exp_avg_dtype and exp_avg_sq_dtype=torch.uint8 (scaled fp8), or "
    'optimizer_options={"exp_avg_dtype": torch.int8} for codes with a scale per block',
)
_answer("is_paged paged", _OFFLOAD)
_answer("percentile_clipping", "set clip_grad, or grad_norm_skip_threshold to skip a step")
_answer("bf16_stochastic_round", "leave it out: main values are kept (only opt_kernels' drop-in optimizers round so)")
# DeepSpeed
_answer(
    "zero zero_stage stage zero_optimization",
    "set use_distributed_optimizer=True for stage 1; for stages 2 and 3, shard the model with torch's fully_shard",
)
_answer("offload_optimizer cpu_offload", _OFFLOAD)
_answer("pin_memory", "set pin_cpu_grads and pin_cpu_params")
_answer("initial_scale_power", "set initial_loss_scale=2.0**power")
_answer("reduce_bucket_size allgather_bucket_size", "set DistributedDataParallelConfig.bucket_size")
_answer("overlap_comm", "set overlap_grad_reduce in DistributedDataParallelConfig")
_answer("gradient_accumulation_steps", "call backward several times before step; see no_sync of the wrapper")
# Megatron's other arguments
_answer(
    "bucket_size overlap_grad_reduce grad_reduce_in_fp32 check_for_nan_in_grad",
    "set it in DistributedDataParallelConfig",
)
_answer("lr_decay_style lr_warmup_steps lr_decay_steps start_wd end_wd", _SCHEDULE)
_answer("lr_warmup_iters lr_decay_iters lr_wsd_decay_iters", f"{_SCHEDULE} in steps")


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
