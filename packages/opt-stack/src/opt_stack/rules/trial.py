"""The trial of a rule of another package, before it is used."""

from typing import Any

import torch

from opt_config import ConfigError, OptimizerConfig
from opt_kernels.codecs import join, split_
from opt_kernels.hooks import bare
from opt_kernels.rules import Needs, Rule
from opt_kernels.works import Batch, Hyper, StateKind, StateSpec, Work

_MEMBERS = ("name", "needs", "state_specs", "codecs", "init_state", "update_")
_SHAPES = {Needs.ELEMENTS: (64,), Needs.MATRICES: (4, 6)}


def check_rule(name: str, rule: Any, config: OptimizerConfig) -> None:
    """Check that `rule`, the rule of `optimizer=name`, declares its states, and that `config` can use it.

    The shapes and dtypes of states are compared with those declared when they are made: see `RuleStateError`.

    Raises:
        ConfigError: the rule lacks a member of `Rule`; its specs leave a shape undefined, or lack a state of its own,
            which checkpoints would lose; or the configuration asks for remainders and the rule cannot update bf16
            parameters with them.
    """
    rule_of = f"optimizer={name!r}: its rule {type(bare(rule)).__name__}"
    missing = [member for member in _MEMBERS if not hasattr(rule, member)]
    if missing or not isinstance(rule.needs, Needs):
        problem = f"lacks {', '.join(missing)}" if missing else f"has needs={rule.needs!r}, which is not a Needs"
        raise ConfigError(f"{rule_of} {problem}; a rule is an opt_kernels.rules.base.Rule, with {', '.join(_MEMBERS)}")
    main = torch.zeros(_SHAPES[rule.needs], dtype=torch.float32, device="cpu")
    for spec in bare(rule).state_specs:
        if problem := _problem_of_spec(spec, main.dim()):
            raise ConfigError(f"{rule_of} declares the state {spec.name!r} with kind={spec.kind}, {problem}")
    try:
        states = bare(rule).init_state(main)
    except Exception:  # the caller's code may raise anything, and may support some shapes only
        states = {}
    if undeclared := sorted(states.keys() - {spec.name for spec in bare(rule).state_specs}):
        raise ConfigError(
            f"{rule_of} keeps {', '.join(undeclared)}, which its state_specs do not declare, so that checkpoints would "
            f"not have it; add StateSpec(name={undeclared[0]!r})"
        )
    if config.precision.remainder:
        _check_remainder(name, rule, torch.int16, "store_param_remainders=True")
    elif config.precision.mains is torch.int8:
        _check_remainder(name, rule, torch.int8, "main_params_dtype=torch.int8")


def _problem_of_spec(spec: StateSpec, num_dims: int) -> str:
    """Return why no parameter of so many dims can have the state; empty if it can."""
    are_dims = isinstance(spec.dims, tuple) and all(type(dim) is int for dim in spec.dims)
    match spec.kind:
        case StateKind.MATRIX if not (are_dims and len(spec.dims) == 1):
            return f"dims={spec.dims!r}; allowed is a tuple of one int, as in dims=(0,)"
        case StateKind.REDUCED if not (are_dims and spec.dims):
            return f"dims={spec.dims!r}; allowed is a tuple of the dims that it lacks, as in dims=(-1,)"
        case StateKind.BLOCK_SCALES if type(spec.block) is not int or spec.block < 1:
            return f"block={spec.block!r}; allowed is the number of elements per scale, at least 1"
        case StateKind.MATRIX | StateKind.REDUCED if not all(-num_dims <= dim < num_dims for dim in spec.dims):
            return f"dims={spec.dims!r}; allowed are dims from {-num_dims} to {num_dims - 1}"
    return ""


def _check_remainder(name: str, rule: Rule, dtype: torch.dtype, field: str) -> None:
    """Raise ConfigError unless one step with a remainder of `dtype` is the step with fp32 main values."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    problem = ""
    values = torch.rand(2, *_SHAPES[rule.needs], dtype=torch.float32, device="cpu", generator=generator) + 0.5
    start, grad = values.unbind()
    try:
        out = torch.empty_like(start, dtype=torch.bfloat16)
        remainder = torch.empty_like(start, dtype=dtype)
        split_(out, remainder, start)
        main = join(out, remainder)
        split = Work(grad=grad.clone(), main=None, state=rule.init_state(main), out=out, remainder=remainder)
        for work in (split, Work(grad=grad.clone(), main=main, state=rule.init_state(main))):
            with torch.no_grad():
                rule.update_([Batch(Hyper(lr=0.01, step=1), [work])])
        joined = join(out, remainder)
        # A remainder of 8 bits gives main values 16 significant bits.
        if not torch.allclose(main, joined, rtol=1e-6 if dtype is torch.int16 else 2.0**-15, atol=1e-7):
            problem = f"updates a parameter differently, by up to {float((main - joined).abs().max()):.1e}"
    except ConfigError:
        raise
    except Exception as error:  # the caller's code may raise anything
        problem = f"raised {type(error).__name__}: {error}"
    if problem:
        raise ConfigError(
            f"{field}: optimizer={name!r} with a remainder {problem}; if a work has no main, a rule must join `out` "
            "and `remainder`, and write both (opt_kernels.codecs); or keep fp32 mains: "
            "store_param_remainders=False and main_params_dtype=torch.float32"
        )
