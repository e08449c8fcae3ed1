"""The functions that a formula may call, on tensors and on host numbers; compiled backends know them by name.

On float32 tensors each is rounded once, so that torch's operations give the bits of the compiled sweeps.
"""

import math
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

Number = TypeVar("Number", float, Tensor)


def fma(a: Any, b: Any, c: Tensor) -> Tensor:
    """Return a * b + c, rounded once."""
    if c.dtype is torch.float64:
        return cast("Tensor", a * b + c)
    # The product of two float32 numbers is exact in float64; rounding the sum twice matters once in 2^29 elements.
    return cast("Tensor", _wide(a) * _wide(b) + c.double()).to(c.dtype)


def _wide(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) else x


def sqrt(x: Number) -> Number:
    """Return the square root, correctly rounded."""
    if isinstance(x, Tensor):
        return x.sqrt() if x.dtype is torch.float64 else x.double().sqrt().to(x.dtype)
    return math.sqrt(x)


def power(base: float, exponent: float) -> float:
    """Return base^exponent; scalars only, with an exponent that is an integer and at least 0."""
    return math.pow(base, exponent)


def sign(x: Tensor) -> Tensor:
    """Return -1, 0 or 1, and NaN for NaN: a diverged weight must not look like one at rest."""
    return torch.where(x == 0, x, torch.where(x.isnan(), x, x.sign()))


def absolute(x: Number) -> Number:
    """Return |x|."""
    return x.abs() if isinstance(x, Tensor) else abs(x)


def maximum(a: Number, b: Number) -> Number:
    """Return the larger; NaN where either is NaN."""
    return torch.maximum(a, b) if isinstance(a, Tensor) else max(a, b)


def minimum(a: Number, b: Number) -> Number:
    """Return the smaller; NaN where either is NaN."""
    return torch.minimum(a, b) if isinstance(a, Tensor) else min(a, b)


def where(condition: Any, a: Any, b: Any) -> Any:
    """Return a where the condition holds, else b."""
    if isinstance(condition, Tensor):
        return torch.where(condition, a, b)
    return a if condition else b
