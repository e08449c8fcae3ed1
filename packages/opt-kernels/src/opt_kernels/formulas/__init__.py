"""Elementwise rules as formulas: the states, the scalars and the update of one element, from which every backend runs.

`formula` says what a formula is, `functions` what it may call; every other module is one rule.
"""

from opt_kernels.formulas.formula import Formula, State
from opt_kernels.formulas.functions import absolute, fma, maximum, minimum, power, sign, sqrt, where
from opt_kernels.formulas.syntax import FormulaError

__all__ = [
    "Formula", "FormulaError", "State", "absolute", "fma", "maximum", "minimum", "power", "sign", "sqrt", "where",
]  # fmt: skip
