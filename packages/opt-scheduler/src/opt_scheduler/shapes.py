"""The ways down from 1 to 0: each shape is a pure function of the fraction done, with f(0) = 1 and f(1) = 0."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

Shape = Callable[[float], float]


def linear(r: float) -> float:
    """1 - r.

    >>> linear(0.0), linear(0.25), linear(1.0)
    (1.0, 0.75, 0.0)
    """
    return 1.0 - r


def cosine(r: float) -> float:
    """(cos(πr) + 1) / 2; Loshchilov and Hutter, https://arxiv.org/abs/1608.03983, equation 5.

    >>> cosine(0.0), cosine(0.5), cosine(1.0)
    (1.0, 0.5, 0.0)
    """
    return 0.5 * (math.cos(math.pi * r) + 1.0)


def exponential(r: float) -> float:
    """2 · 2^-r - 1: an exponential shifted down so that it reaches 0. For the unshifted one see `curves.exponential`.

    >>> exponential(0.0), round(exponential(0.5), 6), exponential(1.0)
    (1.0, 0.414214, 0.0)
    """
    return float(2.0 * 0.5**r - 1.0)


def minus_sqrt(r: float) -> float:
    """1 - √r: steep at first; Hägele et al., https://arxiv.org/abs/2405.18392, section 3.

    >>> minus_sqrt(0.0), minus_sqrt(0.25), minus_sqrt(1.0)
    (1.0, 0.5, 0.0)
    """
    return 1.0 - math.sqrt(r)


def minus_square(r: float) -> float:
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
