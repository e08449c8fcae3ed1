"""The shapes of a decay from 1 to 0: each is a pure function of the fraction done, with f(0) = 1 and f(1) = 0.

The fraction may be an array; `xp` is then the array library that it comes from.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

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
