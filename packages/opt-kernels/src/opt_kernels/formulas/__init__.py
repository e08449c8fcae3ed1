"""Elementwise rules as formulas: the states, scalars and update of one element, which every backend executes.

`formula` defines formulas, `functions` the functions they may call. `syntax` reads their source, and `translate` writes
it in other languages. `registry` lists all formulas. Every other module is one rule.
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
    tanh,
    where,
)
from opt_kernels.formulas.syntax import FormulaError
from opt_kernels.works import Choice, Number, NumberError

# isort: split
from opt_kernels.formulas.registry import FORMULAS  # the file of a new rule may import the names above from here
from opt_kernels.formulas.schedule_free import RisingRates

__all__ = [
    "FORMULAS", "Choice", "Formula", "FormulaError", "Number", "NumberError", "RisingRates", "State", "absolute",
    "exp", "floor", "fma", "log", "maximum", "minimum", "power", "q_pochhammer", "sign", "sqrt", "tanh", "where",
]  # fmt: skip
