"""Lion."""

from typing import Any

from opt_kernels.formulas.lion import LION
from opt_kernels.rules.elementwise import ElementwiseRule, elementwise


def Lion(**options: Any) -> ElementwiseRule:
    """Lion (Chen et al. 2023): every element moves by the learning rate, up or down. It has one state.

    Options: `exp_avg_dtype` and those of `opt_kernels.rules.elementwise.elementwise`. The formula is in
    `formulas/lion.py`.
    """
    return elementwise(LION, **options)
