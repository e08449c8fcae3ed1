"""Generates drop-in optimizer classes from formulas and matrix rules: signatures follow from numbers and choices."""

import sys
from collections.abc import Mapping
from dataclasses import is_dataclass, replace
from inspect import Parameter, Signature, cleandoc
from types import MappingProxyType
from typing import Any, overload

import torch
from torch import Tensor

from opt_kernels.formulas.adam import NUMBERS as ADAM_NUMBERS
from opt_kernels.formulas.formula import LR, WEIGHT_DECAY, Formula
from opt_kernels.optim.base import Params
from opt_kernels.optim.formula_optimizer import AveragedOptimizer, FormulaOptimizer
from opt_kernels.optim.matrices import MatrixOptimizer, options_of
from opt_kernels.rules.whole_matrices import WholeMatrices
from opt_kernels.works import Choice, Constants, unknown

OF_EVERY_DROP_IN: Mapping[str, object] = {
    "mains": "param", "stochastic_rounding": False, "max_norm": None, "hooks": (), "backend": None, "foreach": None,
    "maximize": False, "capturable": False, "differentiable": False, "fused": None,
}  # fmt: skip

COMMON = """

`mains`: "param" updates the parameters themselves; "float32" keeps a float32 copy of every narrower parameter;
"remainder" keeps the low 16 bits of a float32 weight whose upper half is the bfloat16 parameter. {states}: float32,
bfloat16, float16, float8_e4m3fn, float8_e5m2, or 8-bit codes (int8; uint8 for states that are never negative).
`stochastic_rounding`: round bfloat16 parameters without another main stochastically. `max_norm`: clip the total norm of
the gradients within the update. `hooks`: modifications of the update, see `opt_kernels.hooks`; a group may have its
own. `maximize`: maximize the objective. `backend`: "reference", "torch", "cpp" or "triton"; None chooses by device.
float64 parameters have float64 states by default. `foreach` and `fused` are accepted and have no effect: every step is
fused. `capturable`: allow steps to be captured in CUDA graphs, see `RuleOptimizer`. Raises ValueError for
`differentiable=True`, which is not supported, and for an option that is not allowed.
"""


@overload
def drop_in(
    formula: Formula,
    name: str | None = None,
    *,
    choices: Constants = ...,
    base: type[FormulaOptimizer] | None = None,
    **defaults: Any,
) -> type[FormulaOptimizer]: ...


@overload
def drop_in(formula: type[WholeMatrices], name: str | None = None, **defaults: Any) -> type[MatrixOptimizer]: ...


def drop_in(
    formula: Formula | type[WholeMatrices],
    # Of the class. None: the title of the formula, or that of the rule's class and "Optimizer".
    name: str | None = None,
    *,
    choices: Constants = MappingProxyType({}),  # choices that are fixed, not arguments
    base: type[FormulaOptimizer] | None = None,  # None: chosen by the formula
    **defaults: Any,  # of numbers and choices, where they differ from the formula's or the rule's
) -> type[FormulaOptimizer] | type[MatrixOptimizer]:
    """Return a torch.optim.Optimizer class for a formula, or for a matrix rule: a dataclass, `WholeMatrices`.

    Its arguments are the numbers and choices of the formula, and `<state>_dtype` for each state; or the `numbers` and
    fields of the matrix rule, with `betas` and `eps` for the parameters that `scalar_optimizer` updates. Those common
    to all drop-ins follow, of `MatrixOptimizer` for a matrix rule.

    Assign the result to the same name in the calling module, so that optimizers can be pickled. Raises TypeError for
    anything else, and NumberError for a default that is unknown or not allowed.
    """
    if not isinstance(formula, Formula):
        return _of_matrix_rule(formula, name, defaults, sys._getframe(1).f_globals["__name__"])
    if base is None:
        base = FormulaOptimizer if formula.evaluation is None else AveragedOptimizer
    own = {choice.name: defaults.pop(choice.name) for choice in formula.choices if choice.name in defaults}
    made = formula.with_defaults(**defaults).with_constants(**own, **choices)
    open_choices = [c for c in made.choices if c.off_at_zero is None and c.name not in choices]
    recorded = [choice.name for choice in made.choices if choice.is_recorded]
    states = ", ".join(f"`{state.name}_dtype`" for state in made.declared)
    attributes: dict[str, Any] = {
        "formula": made,
        "declared": made.numbers,
        "fixed": (*base.fixed, *recorded),
        "__signature__": _signature(made, open_choices),
        "__doc__": made.description + COMMON.format(states=states),
    }
    attributes["__module__"] = sys._getframe(1).f_globals["__name__"]
    if not made.reads_weight_decay:
        attributes["scheduled"] = ("lr",)
    return type(name or formula.title, (base,), attributes)


def _of_matrix_rule(
    rule: type[WholeMatrices], name: str | None, defaults: dict[str, Any], module: str
) -> type[MatrixOptimizer]:
    is_rule = isinstance(rule, type) and issubclass(rule, WholeMatrices) and is_dataclass(rule)
    if not is_rule:  # the caller may not check types
        raise TypeError(
            f"drop_in({rule!r}): pass a Formula, or a class of matrix rules: a dataclass that is a WholeMatrices"
        )
    # ADAM_NUMBERS: of the rule of parameters that are not matrices.
    numbers = {number.name: number for number in (LR, *ADAM_NUMBERS, WEIGHT_DECAY, *rule.numbers)}
    options = options_of(rule)
    for option, value in defaults.items():
        if option in numbers:
            numbers[option] = replace(numbers[option], default=value)
        elif option in options:
            options[option] = value
        else:
            raise unknown(option, value, [*numbers, *options], of=f"rule {rule.__name__!r}")
    declared = tuple(numbers.values())
    attributes: dict[str, Any] = {
        "numbers": {number.name: number.default for number in declared},
        "options": options,
        "declared": declared,
        "rule_class": rule,
        "__module__": module,
    }
    attributes["__doc__"] = cleandoc(rule.__doc__ or rule.__name__)
    return type(name or f"{rule.__name__}Optimizer", (MatrixOptimizer,), attributes)


def _signature(formula: Formula, choices: list[Choice]) -> Signature:
    """Numbers and choices are positional or named arguments, as in torch.optim; the common options are keyword-only."""
    positional = [Parameter("params", Parameter.POSITIONAL_OR_KEYWORD, annotation=Params)]
    constants = dict(formula.constants)
    for number in formula.numbers:
        kind: Any = "tuple[float, ...]" if isinstance(number.default, tuple) else float
        if number.name == "lr":
            kind = float | Tensor
        positional.append(_parameter(number.name, number.default, kind))
    positional += [_parameter(c.name, constants[c.name], type(c.default)) for c in choices]
    options: dict[str, Any] = {f"{state.name}_dtype": torch.float32 for state in formula.declared}
    options.update(OF_EVERY_DROP_IN)
    by_name = [Parameter(name, Parameter.KEYWORD_ONLY, default=value) for name, value in options.items()]
    return Signature([*positional, *by_name], return_annotation=None)


def _parameter(name: str, default: Any, kind: Any) -> Parameter:
    return Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=kind)
