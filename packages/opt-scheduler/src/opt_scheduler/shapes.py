"""The shapes of a decay from 1 to 0, and what formulas need to take arrays of steps as well as numbers.

A shape is a pure function of the fraction done, with f(0) = 1 and f(1) = 0. The fraction may be an array; `xp` is then
the array library that it comes from.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, Protocol, TypeAlias

Shape: TypeAlias = Callable[..., Any]  # of the fraction done, and of `math`, `numpy` or `jax.numpy`


def linear(r: Any, xp: Any = math) -> Any:
    """1 - r.

    >>> linear(0.0), linear(0.25), linear(1.0)
    (1.0, 0.75, 0.0)
    """
    return 1.0 - r


def cosine(r: Any, xp: Any = math) -> Any:
    """(cos(πr) + 1) / 2; Loshchilov and Hutter, https://arxiv.org/abs/1608.03983, equation 5.

    >>> cosine(0.0), cosine(0.5), cosine(1.0)
    (1.0, 0.5, 0.0)
    """
    return 0.5 * (xp.cos(xp.pi * r) + 1.0)


def exponential(r: Any, xp: Any = math) -> Any:
    """2 · 2^-r - 1: an exponential shifted down to reach 0. For the true one see `opt_scheduler.exponential`.

    >>> exponential(0.0), round(exponential(0.5), 6), exponential(1.0)
    (1.0, 0.414214, 0.0)
    """
    return 2.0 * 0.5**r - 1.0


def minus_sqrt(r: Any, xp: Any = math) -> Any:
    """1 - √r: steep at first; Hägele et al., https://arxiv.org/abs/2405.18392, section 3.

    >>> minus_sqrt(0.0), minus_sqrt(0.25), minus_sqrt(1.0)
    (1.0, 0.5, 0.0)
    """
    return 1.0 - xp.sqrt(r)


def minus_square(r: Any, xp: Any = math) -> Any:
    """1 - r²: slow at first.

    >>> minus_square(0.0), minus_square(0.5), minus_square(1.0)
    (1.0, 0.75, 0.0)
    """
    return 1.0 - r * r


SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "linear": linear,
        "cosine": cosine,
        "exponential": exponential,
        "minus_sqrt": minus_sqrt,
        "minus_square": minus_square,
    }
)

# What formulas may use of an array library, for single numbers: the functions of `math`, and these.
NUMBERS = SimpleNamespace(**vars(math), minimum=min, maximum=max, abs=abs)
NUMBERS.clip = lambda value, low, high: min(max(value, low), high)
NUMBERS.where = lambda condition, a, b: a if condition else b
NUMBERS.full_like = lambda step, value, dtype: dtype(value)


class Array(Protocol):
    """An array of a library that follows the array API standard; a JAX tracer is one too."""

    def __array_namespace__(self, *, api_version: str | None = None) -> Any: ...


def exact(value: float) -> float:
    """Return a whole number as an int: subtracted from steps that are integers, it leaves them integers.

    JAX computes in float32 by default, which counts exactly only up to 2**24.
    """
    return int(value) if value == int(value) and abs(value) < 2**31 else value
