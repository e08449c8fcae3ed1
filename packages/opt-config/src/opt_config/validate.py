"""Checks of configurations: types, intervals, choices, and fields of OptimizerConfig that conflict."""

import dataclasses
import math
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Union, get_args, get_origin, get_type_hints

import torch

from opt_config.errors import ConfigError, Problem, did_you_mean, is_too_large

if TYPE_CHECKING:
    from opt_config.optimizer_config import OptimizerConfig


class Dataclass(Protocol):
    """Any instance of a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


class Interval(NamedTuple):
    """The numbers from `low` to `high`. Either end may be excluded."""

    low: float
    high: float = math.inf
    low_open: bool = False
    high_open: bool = True  # with the default `high`, excludes infinity

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, int | float) or is_too_large(value):
            return False
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        return above and below

    def __str__(self) -> str:
        return f"{'(' if self.low_open else '['}{self.low:g}, {self.high:g}{')' if self.high_open else ']'}"

    @property
    def sentence(self) -> str:
        """The allowed values in words, for messages."""
        if not math.isinf(self.high):
            return f"must be in {self}"
        bound = f"must be {'greater than' if self.low_open else 'at least'} {self.low:g}"
        return f"{bound} and finite" if self.high_open else bound


INT8_CODES = "for int8 codes with a scale per block, pass optimizer_options={'exp_avg_dtype': torch.int8}"

NOT_NEGATIVE = Interval(0)
POSITIVE = Interval(0, low_open=True)
POSITIVE_OR_INFINITE = Interval(0, low_open=True, high_open=False)
AT_LEAST_ONE = Interval(1)
AT_LEAST_TWO = Interval(2)
DECAY_RATE = Interval(0, 1)
FRACTION = Interval(0, 1, high_open=False)
SHARE = Interval(0, 1, low_open=True, high_open=False)


@cache
def field_types(cls: type) -> Mapping[str, Any]:
    """Return the annotated types of the fields of a dataclass, in order."""
    hints = get_type_hints(cls)
    return types.MappingProxyType({field.name: hints[field.name] for field in dataclasses.fields(cls)})


def field_default(field: dataclasses.Field[Any]) -> object:
    """Return the default of a dataclass field; every field of a configuration has one."""
    assert field.default is not dataclasses.MISSING
    return field.default


def check(
    config: Dataclass, singly: Callable[[], Iterable[Problem]], together: Callable[[], Iterable[Problem]]
) -> None:
    """Raise `ConfigError` with every problem of `config`.

    `singly` finds problems of single fields, of which those of a wrong type are left out; `together`, called once
    every field is valid, finds conflicts between fields.
    """
    problems = [*type_problems(config), *integer_problems(config)]
    wrong = {problem.field for problem in problems}
    problems += [problem for problem in singly() if problem.field not in wrong]
    if problems := problems or list(together()):
        raise ConfigError.of(type(config).__name__, problems)


def type_problems(config: Dataclass) -> Iterator[Problem]:
    """Yield a problem for each field whose value is not of its annotated type. NaN is not accepted as a number."""
    for name, hint in field_types(type(config)).items():
        value = getattr(config, name)
        if not accepts(hint, value):
            yield Problem(name, value, f"must be {type_words(hint)}{_hint_at_dtype(hint, value)}")


def integer_problems(config: Dataclass) -> Iterator[Problem]:
    """Yield a problem for each integer that no integer type of tensors and files holds."""
    for name, hint in field_types(type(config)).items():
        value = getattr(config, name)
        if int in options(hint) and isinstance(value, int) and not -(2**63) <= value < 2**63:
            yield Problem(name, value, "must be an integer of at most 64 bits")


def interval_problems(config: Dataclass, intervals: Mapping[str, Interval]) -> Iterator[Problem]:
    """Yield a problem for each number outside its interval. None passes: `type_problems` checks if it is allowed."""
    for name in field_types(type(config)):
        value = getattr(config, name)
        if name in intervals and value is not None and value not in intervals[name]:
            yield Problem(name, value, intervals[name].sentence)


def choice_problems(config: Dataclass, choices: Mapping[str, Iterable[object]]) -> Iterator[Problem]:
    """Yield a problem for each value that is not one of its field's choices."""
    for name, allowed in choices.items():
        value = getattr(config, name)
        if value is not None and value not in allowed:
            known = [str(choice) for choice in allowed]
            hint = did_you_mean(value, known) if isinstance(value, str) else ""
            hint = f" {INT8_CODES.capitalize()}." if value is torch.int8 and "exp_avg" in name else hint
            yield Problem(name, value, f"must be one of {', '.join(known)}.{hint}")


def options(hint: Any) -> tuple[Any, ...]:
    """Return the types that an annotation allows: the members of a union, or the annotation itself."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def accepts(hint: Any, value: object) -> bool:
    """Whether a field annotated `hint` may hold `value`."""
    if len(options(hint)) > 1:
        return any(accepts(option, value) for option in options(hint))
    if hint is types.NoneType:
        return value is None
    if get_origin(hint) is tuple:
        (item, _) = get_args(hint)
        return isinstance(value, tuple) and all(accepts(item, each) for each in value)
    if get_origin(hint) is Callable:
        return callable(value)
    if get_origin(hint) is Mapping:
        return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and value == value
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def type_words(hint: Any) -> str:
    """Return a type in words, for messages."""
    if len(options(hint)) > 1:
        return " or ".join(type_words(option) for option in options(hint))
    if get_origin(hint) is tuple:
        return f"a tuple, each item {type_words(get_args(hint)[0])}"
    if get_origin(hint) is Callable:
        return "a callable"
    if get_origin(hint) is Mapping:
        return "a table of options by name"
    words = {
        bool: "True or False",
        int: "an int",
        float: "a number",
        str: "a string",
        torch.dtype: "a torch.dtype",
        types.NoneType: "None",
    }
    return words[hint]


def _hint_at_dtype(hint: Any, value: object) -> str:
    if hint is not torch.dtype or not isinstance(value, str):
        return ""
    if value in ("int8", "torch.int8"):
        return f"; {INT8_CODES}"
    return "; from_dict and load_config read dtypes from strings"


_FIELDS_OF_INTERVALS = {
    NOT_NEGATIVE: "lr min_lr decoupled_lr decoupled_min_lr weight_decay clip_grad",
    POSITIVE: ("loss_scale initial_loss_scale min_loss_scale adam_eps muon_extra_scale_factor adaptive_muon_eps"),
    POSITIVE_OR_INFINITE: "grad_norm_skip_threshold skip_sigma",
    AT_LEAST_TWO: "skip_window",
    AT_LEAST_ONE: (
        "loss_scale_window hysteresis muon_num_ns_steps soap_precondition_frequency soap_max_precond_dim ema_from_step"
    ),
    DECAY_RATE: (
        "adam_beta1 adam_beta2 sgd_momentum muon_momentum lion_beta1 lion_beta2 soap_shampoo_beta adaptive_muon_beta2 "
        "ema_nesterov_gamma"
    ),
    FRACTION: "optimizer_offload_fraction",
    SHARE: "ema_share",
}
INTERVALS = MappingProxyType(
    {name: interval for interval, names in _FIELDS_OF_INTERVALS.items() for name in names.split()}
)

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
_FP8_RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4")
_NAMES = {name: tuple(words.split()) for name, words in _WORDS.items()}
CHOICES: Mapping[str, tuple[object, ...]] = MappingProxyType({"fp8_recipe": _FP8_RECIPES, **_DTYPES, **_NAMES})

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
}
_NEEDS = MappingProxyType({name: needed for needed, names in _FIELDS_THAT_NEED.items() for name in names.split()})
AVERAGED = ("ema_decay", "ema_nesterov_beta")
"""Fields of which each switches on an average of the weights."""
_OF_DYNAMIC_SCALE = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")


def validate_optimizer_config(config: "OptimizerConfig") -> None:
    """Raise `ConfigError` with every problem of `config`. Conflicts are checked once every single field is valid."""

    def singly() -> Iterator[Problem]:
        yield from interval_problems(config, INTERVALS)
        yield from choice_problems(config, CHOICES)
        if isinstance(config.optimizer, str) and not re.fullmatch(r"[A-Za-z_][\w.:-]*", config.optimizer):
            yield Problem("optimizer", config.optimizer, "must be the name of a rule, such as adam, sgd or muon")
        for name in AVERAGED:
            if reason := _problem_of_average(getattr(config, name)):
                yield Problem(name, getattr(config, name), reason)

    check(config, singly, lambda: _conflicts(config))


def _conflicts(config: "OptimizerConfig") -> Iterator[Problem]:
    """Problems of fields that are valid individually but not together."""
    yield from _needs(config)
    yield from _learning_rates(config)
    yield from _dtypes(config)
    yield from _precision_aware(config)
    yield from _fp8(config)
    yield from _shards(config)
    yield from _averages(config)
    if config.optimizer_cpu_offload and config.optimizer_offload_fraction == 0:
        reason = "offloads nothing; set it in (0, 1], or set optimizer_cpu_offload=False"
        yield Problem("optimizer_offload_fraction", config.optimizer_offload_fraction, reason)
    if config.optimizer_cpu_offload and config.optimizer_cuda_graph:
        reason = "excludes optimizer_cuda_graph: a graph cannot wait for an update on the host; set only one of them"
        yield Problem("optimizer_cpu_offload", True, reason)
    if config.optimizer_offload_compute == "device" and config.use_torch_optimizer_for_cpu_offload:
        reason = "excludes use_torch_optimizer_for_cpu_offload, which updates on the host; set only one of them"
        yield Problem("optimizer_offload_compute", "device", reason)
    if config.optimizer_offload_compute == "device" and config.averages is not None:
        reason = (
            "excludes averages of weights (ema_decay, ema_nesterov_beta), which the host computes; set it to 'host'"
        )
        yield Problem("optimizer_offload_compute", "device", reason)
    if config.optimizer.lower() == "adamw" and not config.decoupled_weight_decay:
        reason = "contradicts optimizer='adamw', which decouples it; set optimizer='adam' to add it to the gradient"
        yield Problem("decoupled_weight_decay", False, reason)
    yield from _loss_scale(config)


def _problem_of_average(value: object) -> str:
    """Return why a decay or look-ahead is not allowed; empty if it is."""
    if isinstance(value, Mapping):
        if set(value) == {"half_life"}:
            return "a half-life is a fraction of the training; add its number of steps as num_steps"
        if set(value) != {"half_life", "num_steps"}:
            return "must have half_life, a fraction of the training, and num_steps, the steps of the training"
        for name, interval in (("half_life", SHARE), ("num_steps", AT_LEAST_ONE)):
            if value[name] not in interval:
                return f"{name} {interval.sentence}"
        return ""
    is_number = isinstance(value, int | float)
    return DECAY_RATE.sentence if is_number and value not in DECAY_RATE else ""


def _averages(config: "OptimizerConfig") -> Iterator[Problem]:
    for name in AVERAGED:
        value = getattr(config, name)
        if value is not None and config.optimizer.lower() == "schedule_free":
            reason = "excludes optimizer='schedule_free', which keeps an average of its own; set only one of them"
            yield Problem(name, value, reason)
        if callable(value) and config.optimizer_cuda_graph:
            reason = (
                "is a function, which is called with the number of steps made, but with optimizer_cuda_graph=True only "
                "the device knows it; set a number, which opt_scheduler.FieldScheduler may change"
            )
            yield Problem(name, value, reason)


def _needs(config: "OptimizerConfig") -> Iterator[Problem]:
    defaults = {field.name: field_default(field) for field in dataclasses.fields(config)}
    for name, needed in _NEEDS.items():
        value = getattr(config, name)
        if value != defaults[name] and getattr(config, needed) == defaults[needed]:
            reason = f"has no effect without {needed}; set that too, or leave this at {defaults[name]!r}"
            yield Problem(name, value, reason)


def _loss_scale(config: "OptimizerConfig") -> Iterator[Problem]:
    if config.min_loss_scale > config.initial_loss_scale:
        reason = f"must not be above initial_loss_scale={config.initial_loss_scale!r}"
        yield Problem("min_loss_scale", config.min_loss_scale, reason)
    elif not config.fp16:
        for field in dataclasses.fields(config):
            value = getattr(config, field.name)
            if field.name in _OF_DYNAMIC_SCALE and value != field.default:
                reason = "has no effect: the loss scale is dynamic only with fp16=True"
                yield Problem(field.name, value, f"{reason}; set that, or leave it at {field.default!r}")


def _learning_rates(config: "OptimizerConfig") -> Iterator[Problem]:
    lr = config.lr
    low = config.min_lr
    if lr is not None and low is not None and low > lr:
        yield Problem("min_lr", low, f"must not be above lr={lr!r}")
    lr = config.decoupled_lr
    low = config.decoupled_min_lr
    if lr is not None and low is not None and low > lr:
        yield Problem("decoupled_min_lr", low, f"must not be above decoupled_lr={lr!r}")
    if lr is not None and low is None and config.min_lr is not None and config.min_lr > lr:
        reason = f"must not be below min_lr={config.min_lr!r}, to which the schedule would raise it"
        yield Problem("decoupled_lr", lr, f"{reason}; set decoupled_min_lr")


def _dtypes(config: "OptimizerConfig") -> Iterator[Problem]:
    if config.fp16 and config.bf16:
        yield Problem("fp16", True, "excludes bf16=True; set only one of them")
    by_flag = torch.float16 if config.fp16 else torch.bfloat16 if config.bf16 else None
    if by_flag is not None and config.params_dtype not in (torch.float32, by_flag):
        flag = "fp16" if config.fp16 else "bf16"
        yield Problem("params_dtype", config.params_dtype, f"contradicts {flag}=True; leave it out or set {by_flag}")
    if by_flag is None and config.params_dtype is torch.float16:
        yield Problem("params_dtype", config.params_dtype, "needs loss scaling; set fp16=True")
    if config.main_grads_dtype is torch.bfloat16 and config.precision.params is not torch.bfloat16:
        reason = "is allowed for bf16 parameters only; set bf16=True, or leave it out"
        yield Problem("main_grads_dtype", config.main_grads_dtype, reason)
    if config.main_params_dtype is torch.float16 and config.precision.params is torch.float32:
        reason = (
            "is allowed for 16-bit parameters only, since fp32 parameters have no mains; set bf16=True or fp16=True"
        )
        yield Problem("main_params_dtype", config.main_params_dtype, f"{reason}, or leave it out")
    if config.main_params_dtype is torch.int8 and config.precision.params is not torch.bfloat16:
        reason = "is an 8-bit remainder of bf16 parameters; set bf16=True, or leave it out"
        yield Problem("main_params_dtype", config.main_params_dtype, reason)
    if config.main_params_dtype is torch.int8 and not config.store_param_remainders:
        reason = "is an 8-bit remainder, but store_param_remainders=False; set only one of them"
        yield Problem("main_params_dtype", config.main_params_dtype, reason)


def _precision_aware(config: "OptimizerConfig") -> Iterator[Problem]:
    params = config.precision.params
    if not config.use_precision_aware_optimizer or params is torch.bfloat16:
        return
    if not config.store_param_remainders:
        reason = f"has no effect: {params} parameters have no remainders; set bf16=True, or leave it at True"
        yield Problem("store_param_remainders", False, reason)
    if all(getattr(config, name) is torch.float32 for name in _NARROWER):
        names = _NARROWER[1:] if params is torch.float16 else _NARROWER[2:]
        reason = f"has no effect: nothing of {params} parameters is narrower; set {' or '.join(names)}, or leave it out"
        yield Problem("use_precision_aware_optimizer", True, reason)


def _fp8(config: "OptimizerConfig") -> Iterator[Problem]:
    recipe = config.fp8_recipe
    if config.reuse_grad_buf_for_mxfp8_param_ag and recipe != "mxfp8":
        yield Problem("reuse_grad_buf_for_mxfp8_param_ag", True, "needs fp8_recipe='mxfp8'; leave it out otherwise")
    if recipe is None:
        return
    if recipe == "nvfp4":
        yield Problem("fp8_recipe", recipe, "4-bit parameters are not supported; use 'mxfp8', or keep them in bf16")
    if config.optimizer_cpu_offload:
        reason = "excludes optimizer_cpu_offload: mains of fp8 parameters must stay on the device; set only one of them"
        yield Problem("fp8_recipe", recipe, reason)
    if config.main_params_dtype is not torch.float32:
        reason = "excludes fp8_recipe: mains of fp8 parameters are fp32; leave it out"
        yield Problem("main_params_dtype", config.main_params_dtype, reason)
    if config.optimizer_cuda_graph:
        reason = "excludes optimizer_cuda_graph: scales are exchanged between update and gather; set only one of them"
        yield Problem("fp8_recipe", recipe, reason)


def _shards(config: "OptimizerConfig") -> Iterator[Problem]:
    flat = config.use_distributed_optimizer
    whole = config.use_layer_wise_distributed_optimizer
    if flat and whole:
        reason = "excludes use_layer_wise_distributed_optimizer, which also shards the state; set only one of them"
        yield Problem("use_distributed_optimizer", True, reason)
    if config.overlap_param_gather and not (flat or whole):
        reason = "needs sharded state; set use_distributed_optimizer or use_layer_wise_distributed_optimizer"
        yield Problem("overlap_param_gather", True, reason)
    if config.overlap_param_gather_with_optimizer_step and config.optimizer_cuda_graph:
        reason = "excludes optimizer_cuda_graph: a captured step is a single call; set only one of them"
        yield Problem("overlap_param_gather_with_optimizer_step", True, reason)
    if config.overlap_param_gather_with_optimizer_step and whole:
        reason = "needs use_distributed_optimizer; layer-wise sharding already gathers bucket by bucket"
        yield Problem("overlap_param_gather_with_optimizer_step", True, reason)
