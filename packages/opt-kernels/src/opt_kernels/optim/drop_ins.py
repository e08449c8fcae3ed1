"""Drop-in optimizers made from formulas: a class for each, with the signature that its numbers and choices make."""

import sys
from collections.abc import Mapping
from inspect import Parameter, Signature
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from opt_kernels.formulas.formula import Formula
from opt_kernels.formulas.numbers import Choice, Constant
from opt_kernels.optim.averaged import AveragedOptimizer
from opt_kernels.optim.base import Params
from opt_kernels.optim.formula_optimizer import FormulaOptimizer

OF_EVERY_DROP_IN: Mapping[str, object] = MappingProxyType(
    {
        "mains": "param", "stochastic_rounding": False, "max_norm": None, "hooks": (), "backend": None, "foreach": None,
        "maximize": False, "capturable": False, "differentiable": False, "fused": None,
    }
)  # fmt: skip

COMMON = """

`mains`: "param" updates the parameters themselves; "float32" keeps a float32 copy of each narrower one; "remainder"
keeps the 16 bits that a bfloat16 parameter lacks of float32. {states} `stochastic_rounding`: bfloat16 parameters that
have no other main are rounded stochastically. `max_norm`: clip the gradients' total norm within the update. `hooks`:
what stands around the update, see `opt_kernels.hooks`; a group may have its own. `maximize`:
follow the negative gradient. `backend`: "reference", "torch", "cpp" or "triton"; None chooses by device. The states of
a float64 parameter are float64 where those of others are float32. `foreach` and `fused` change nothing: every step is
fused. Raises ValueError for `capturable` and `differentiable`, which are not offered, and for an option that is not
allowed.
"""


def drop_in(
    formula: Formula,
    name: str | None = None,  # of the class; None: the formula's title
    *,
    choices: Mapping[str, Constant] = MappingProxyType({}),  # those that are made for good
    base: type[FormulaOptimizer] | None = None,  # None: by the formula
    **defaults: Any,  # of its numbers and choices, where they are others than the formula's
) -> type[FormulaOptimizer]:
    """A torch.optim.Optimizer class of this name over `formula`: its arguments are the formula's numbers and choices,
    `<state>_dtype` for each state, and those that all drop-ins have.

    Give the result the same name in the module that calls this, so that optimizers can be pickled.
    """
    if base is None:
        base = FormulaOptimizer if formula.evaluation is None else AveragedOptimizer
    own = {choice.name: defaults.pop(choice.name) for choice in formula.choices if choice.name in defaults}
    made = formula.with_defaults(**defaults).with_constants(**own, **choices)
    open_choices = [c for c in made.choices if c.off_at_zero is None and c.name not in choices]
    attributes: dict[str, Any] = {
        "formula": made,
        "fixed": (*base.fixed, *(c.name for c in made.choices if c.off_at_zero is None and c.name != "order")),
        "__signature__": _signature(made, open_choices),
        "__doc__": made.description + COMMON.format(states=_states_in_words(made)),
        "__module__": sys._getframe(1).f_globals["__name__"],
    }
    made_class: type[FormulaOptimizer] = type(name or formula.title, (base,), attributes)
    return made_class


def _signature(formula: Formula, choices: list[Choice]) -> Signature:
    """Numbers and choices by position or name, as torch.optim has them; then, by name only, what all drop-ins have."""
    positional = [Parameter("params", Parameter.POSITIONAL_OR_KEYWORD, annotation=Params)]
    constants = dict(formula.constants)
    for number in formula.numbers:
        kind: Any = "tuple[float, ...]" if isinstance(number.default, tuple) else float
        if number.name == "lr":
            kind = float | Tensor
        positional.append(_parameter(number.name, number.default, kind))
    positional += [_parameter(c.name, constants[c.name], type(c.default)) for c in choices]
    dtypes = {f"{state.name}_dtype": torch.float32 for state in formula.declared}
    by_name = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=default)
        for name, default in (dtypes | {**OF_EVERY_DROP_IN}).items()
    ]
    return Signature([*positional, *by_name], return_annotation=None)


def _parameter(name: str, default: Any, kind: Any) -> Parameter:
    return Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=kind)


def _states_in_words(formula: Formula) -> str:
    names = ", ".join(f"`{state.name}_dtype`" for state in formula.declared)
    floats = "float32, bfloat16, float16, float8_e4m3fn, float8_e5m2"
    return f"{names}: {floats}, or 8-bit codes (int8; uint8 for what is never negative)."
