"""Elementwise rules as formulas: the states, the scalars and the update of one element, from which every backend runs.

`formula` says what a formula is, `numbers` what it is configured by, `functions` what it may call, `registry` lists
those that there are; every other module is one rule.
"""

from opt_kernels.formulas.formula import Formula, State
from opt_kernels.formulas.functions import (
    absolute,
    exp,
    floor,
    fma,
    log,
    maximum,
    minimum,
    power,
    q_pochhammer,
    sign,
    sqrt,
    where,
)
from opt_kernels.formulas.numbers import Choice, Number, NumberError
from opt_kernels.formulas.syntax import FormulaError

__all__ = [
    "Choice", "Formula", "FormulaError", "Number", "NumberError", "State", "absolute", "exp", "floor", "fma", "log",
    "maximum", "minimum", "power", "q_pochhammer", "sign", "sqrt", "where",
]  # fmt: skip
