"""The functions that a formula may call, on tensors and on host numbers. Compiled backends map them by name.

On float32 tensors each is rounded once, so that torch's operations give the bits of the compiled sweeps.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

Number = TypeVar("Number", float, Tensor)
TERMS = 64  # number of terms of the series in `q_pochhammer`


def fma(a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, rounded once. For float64 tensors the product is rounded, too."""
    like = _first_tensor(c, a, b)
    if like is None and all(map(math.isfinite, (a, b, c))):
        return float(Fraction(a) * Fraction(b) + Fraction(c))
    if like is None or like.dtype is torch.float64:
        return a * b + c
    # The product of two float32 numbers is exact in float64; rounding the sum twice matters once in 2^29 elements.
    return (_wide(a) * _wide(b) + _wide(c)).to(like.dtype)


def _first_tensor(*values: Any) -> Tensor | None:
    return next((x for x in values if isinstance(x, Tensor)), None)


def _wide(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) else _rounded(x)


@cache
def _rounded(x: float) -> float:
    """A literal as the float32 number that it is in compiled sweeps."""
    return float(torch.tensor(x, dtype=torch.float32, device="cpu"))


def sqrt(x: Number) -> Number:
    """Return the square root, correctly rounded."""
    return _rounded_once(x, torch.sqrt, math.sqrt)


def exp(x: Number) -> Number:
    """Return e^x. On float32 elements it is computed in float64 and rounded."""
    return _rounded_once(x, torch.exp, math.exp)


def log(x: Number) -> Number:
    """Return the natural logarithm. On float32 elements it is computed in float64 and rounded."""
    return _rounded_once(x, torch.log, math.log)


def tanh(x: Number) -> Number:
    """Return the hyperbolic tangent. On float32 elements it is computed in float64 and rounded."""
    return _rounded_once(x, torch.tanh, math.tanh)


def _rounded_once(x: Number, of_tensor: Callable[[Tensor], Tensor], of_number: Callable[[float], float]) -> Number:
    if isinstance(x, Tensor):
        return of_tensor(x.double()).to(x.dtype)
    return of_number(x)


def power(base: Any, exponent: Any) -> Any:
    """Return base^exponent, also written `base ** exponent`. On float32 elements it is computed in float64 and rounded.

    The base of an exponent that is not an integer is at least 0; of elements below it is NaN.
    """
    like = _first_tensor(base, exponent)
    if like is None:
        return math.pow(base, exponent)
    return torch.pow(_wide(base), _wide(exponent)).to(like.dtype)


def floor(x: float) -> float:
    """Return the largest integer that is not above x; scalars only."""
    return float(math.floor(x))


def q_pochhammer(a: float, q: float, count: float) -> float:
    """Return (a; q)_count, the product of 1 - a q^k for k from 0 to count - 1; scalars only, |a| <= 1/2, 0 < q <= 1.

    Its logarithm is -sum_j a^j / j * (1 - q^(j count)) / (1 - q^j), a series whose first 64 terms are exact in float64.
    """
    total = 0.0
    for j in range(1, TERMS + 1):
        shrinking = 1 - math.exp(j * math.log(q))
        geometric = (1 - math.exp(j * count * math.log(q))) / shrinking if shrinking else count
        total += a**j / j * geometric
    return math.exp(-total)


def sign(x: Number) -> Number:
    """Return -1, 0 or 1, and NaN for NaN, so that a diverged weight does not look converged."""
    if not isinstance(x, Tensor):
        return x if x == 0 or x != x else math.copysign(1.0, x)
    return torch.where(x == 0, x, torch.where(x.isnan(), x, x.sign()))


def absolute(x: Number) -> Number:
    """Return |x|."""
    return abs(x)


def maximum(a: Any, b: Any) -> Any:
    """Return the larger value; NaN if either is NaN."""
    return _chosen(a, b, torch.maximum, max)


def minimum(a: Any, b: Any) -> Any:
    """Return the smaller value; NaN if either is NaN."""
    return _chosen(a, b, torch.minimum, min)


def _chosen(a: Any, b: Any, of_tensors: Callable[..., Tensor], of_numbers: Callable[..., Any]) -> Any:
    like = _first_tensor(a, b)
    if like is None:
        return of_numbers(a, b)
    return of_tensors(*(torch.as_tensor(x, dtype=like.dtype, device=like.device) for x in (a, b)))


def where(condition: Any, a: Any, b: Any) -> Any:
    """Return a if the condition holds, else b; elementwise for a tensor."""
    if isinstance(condition, Tensor):
        if not isinstance(a, Tensor) and not isinstance(b, Tensor):  # torch would give them its default dtype
            a = torch.tensor(a, dtype=torch.float32, device=condition.device)
        return torch.where(condition, a, b)
    return a if condition else b
