"""Steps given as arrays of NumPy or JAX: recognized by the array API standard, so that neither is imported."""

import math
import numbers
from types import SimpleNamespace
from typing import Any, Protocol

# Steps of other dtypes are converted: unsigned ones wrap below 0, and short ones cannot hold the length of a run.
_KEPT = ("int32", "int64", "float32", "float64")


# What the formulas use of an array library, for single numbers.
NUMBERS = SimpleNamespace(
    pi=math.pi, cos=math.cos, sqrt=math.sqrt, minimum=min, maximum=max,
    where=lambda condition, a, b: a if condition else b, full_like=lambda step, value, dtype: dtype(value),
)  # fmt: skip


class Array(Protocol):
    """An array of a library that follows the array API standard; a JAX tracer is one too."""

    def __array_namespace__(self, *, api_version: str | None = None) -> Any: ...


def is_array(step: object) -> bool:
    """Whether `step` is an array. A NumPy scalar is a number."""
    return hasattr(step, "__array_namespace__") and not isinstance(step, numbers.Number)


def namespace(step: Array) -> Any:
    """Return the module with the functions for `step`, such as `jax.numpy`."""
    return step.__array_namespace__()


def usable_steps(step: Any) -> Any:
    """Return `step` in a signed dtype of at least 32 bits."""
    return step if str(step.dtype) in _KEPT else step.astype(float)


def exact(value: float) -> float:
    """Return a whole number as an int: subtracted from steps that are integers, it leaves them integers.

    JAX computes in float32 by default, which counts exactly only up to 2**24.
    """
    return int(value) if value == int(value) and abs(value) < 2**31 else value
