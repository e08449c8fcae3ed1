"""Check a custom rule when the optimizer is built, by trying it: its members, and updates with remainders."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opt_config import ConfigError, OptimizerConfig
from opt_kernels.codecs import join, split_
from opt_kernels.hooks import bare
from opt_kernels.rules import Needs, Rule
from opt_kernels.works import Batch, Hyper, StateKind, StateSpec, Work

_MEMBERS = ("name", "needs", "state_specs", "codecs", "init_state", "update_")
_SHAPES = {Needs.ELEMENTS: (64,), Needs.MATRICES: (4, 6)}


def checked_rule(name: str, rule: Any, config: OptimizerConfig) -> Rule:
    """Return `rule`, the rule of `optimizer=name`, if `config` can use it.

    Raises:
        ConfigError: the rule lacks a member of `Rule`; its states are not those that it declares; or the configuration
            asks for remainders and the rule cannot update bf16 parameters with them.
    """
    missing = [member for member in _MEMBERS if not hasattr(rule, member)]
    if missing or not isinstance(rule.needs, Needs):
        problem = f"lacks {', '.join(missing)}" if missing else f"has needs={rule.needs!r}, which is not a Needs"
        raise ConfigError(
            f"optimizer={name!r}: its rule {type(rule).__name__} {problem}; a rule is an opt_kernels.rules.base.Rule, "
            f"with {', '.join(_MEMBERS)}"
        )
    if not type(bare(rule)).__module__.startswith(("opt_kernels.", "opt_stack.")):
        _check_states(name, bare(rule))
        if config.precision.remainder:
            _check_remainder(name, rule, torch.int16, "store_param_remainders=True")
        elif config.precision.mains is torch.int8:
            _check_remainder(name, rule, torch.int8, "main_params_dtype=torch.int8")
    checked: Rule = rule
    return checked


def _check_states(name: str, rule: Rule) -> None:
    """Raise ConfigError if `state_specs` leave a shape undefined, or if the states of a trial parameter are not those
    that they declare: checkpoints would lose or refuse them."""
    rule_of = f"optimizer={name!r}: its rule {type(rule).__name__}"
    for spec in rule.state_specs:
        _check_spec(rule_of, spec)
    main = torch.zeros(_SHAPES[rule.needs])
    try:
        states = rule.init_state(main)
    except Exception:  # the caller's code may raise anything, and may support some shapes only
        return
    declared = {spec.name: spec for spec in rule.state_specs}
    if undeclared := sorted(states.keys() - declared.keys()):
        raise ConfigError(
            f"{rule_of} keeps {', '.join(undeclared)}, which its state_specs do not declare, so that checkpoints would "
            f"not have it; add StateSpec(name={undeclared[0]!r})"
        )
    for spec in declared.values():
        state = states.get(spec.name)
        if state is not None:
            _check_dims(rule_of, spec, main.shape)
        expected = None if state is None or spec.by_part else _shape_of(spec, main.shape, state)
        if state is None and not spec.optional:
            raise ConfigError(f"{rule_of} declares the state {spec.name!r}, which its init_state does not return")
        if state is not None and expected is not None and tuple(state.shape) != expected:
            raise ConfigError(
                f"{rule_of} keeps {spec.name!r} of shape {tuple(state.shape)} for a parameter of shape "
                f"{tuple(main.shape)}, but declares kind={spec.kind}, dims={spec.dims}, which is {expected}; pass "
                "StateSpec(kind=StateKind.MATRIX, dims=(dim,)) for a square matrix of the size of one dim, "
                "StateKind.REDUCED with the dims that it lacks, StateKind.SCALAR for one number, or StateKind.SHAPED "
                "with its shape, as in shape=('n', 8)"
            )


def _shape_of(spec: StateSpec, shape: Sequence[int], state: Tensor) -> tuple[int, ...] | None:
    """The shape that a state is declared to have; None if other things decide it."""
    return (1,) * state.dim() if spec.kind is StateKind.SCALAR else spec.shape_for(shape)


def _check_spec(rule_of: str, spec: StateSpec) -> None:
    """Raise ConfigError for a spec whose `dims` or `block` cannot be those of its kind, whatever the parameter."""
    match spec.kind:
        case StateKind.MATRIX if not (_are_dims(spec.dims) and len(spec.dims) == 1):
            problem = f"dims={spec.dims!r}; allowed is a tuple of one int, as in dims=(0,)"
        case StateKind.REDUCED if not (_are_dims(spec.dims) and spec.dims):
            problem = f"dims={spec.dims!r}; allowed is a tuple of the dims that it lacks, as in dims=(-1,)"
        case StateKind.BLOCK_SCALES if type(spec.block) is not int or spec.block < 1:
            problem = f"block={spec.block!r}; allowed is the number of elements per scale, at least 1"
        case _:
            return
    raise ConfigError(f"{rule_of} declares the state {spec.name!r} with kind={spec.kind}, {problem}")


def _are_dims(dims: Any) -> bool:
    return isinstance(dims, tuple) and all(type(dim) is int for dim in dims)


def _check_dims(rule_of: str, spec: StateSpec, shape: Sequence[int]) -> None:
    """Raise ConfigError for `dims` that a parameter of `shape` does not have."""
    beyond = [dim for dim in spec.dims if not -len(shape) <= dim < len(shape)]
    if beyond and spec.kind in (StateKind.MATRIX, StateKind.REDUCED):
        raise ConfigError(
            f"{rule_of} declares the state {spec.name!r} with kind={spec.kind}, dims={spec.dims}, but keeps it for a "
            f"parameter of shape {tuple(shape)}, which has no dim {beyond[0]}; allowed are {-len(shape)} to "
            f"{len(shape) - 1}"
        )


def _check_remainder(name: str, rule: Rule, dtype: torch.dtype, field: str) -> None:
    """Raise ConfigError unless one step with a remainder of `dtype` is the step with fp32 main values."""
    generator = torch.Generator().manual_seed(0)
    start, grad = (torch.rand(_SHAPES[rule.needs], generator=generator) + 0.5 for _ in range(2))
    try:
        out, remainder = torch.empty_like(start, dtype=torch.bfloat16), torch.empty_like(start, dtype=dtype)
        split_(out, remainder, start)
        main = join(out, remainder)
        _step(rule, Work(grad=grad.clone(), main=None, state=rule.init_state(main), out=out, remainder=remainder))
        _step(rule, Work(grad=grad.clone(), main=main, state=rule.init_state(main)))
        problem = _difference(main, join(out, remainder), rtol=1e-6 if dtype is torch.int16 else 2.0**-15)
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


def _step(rule: Rule, work: Work) -> None:
    with torch.no_grad():
        rule.update_([Batch(Hyper(lr=0.01, step=1), [work])])


def _difference(main: Tensor, joined: Tensor, *, rtol: float) -> str:
    if torch.allclose(main, joined, rtol=rtol, atol=1e-7):
        return ""
    return f"updates a parameter differently, by up to {float((main - joined).abs().max()):.1e}"
