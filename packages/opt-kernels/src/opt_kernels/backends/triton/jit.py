"""The only module that imports Triton. Importing it raises ImportError if Triton is not installed."""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]
from triton.runtime.jit import JITFunction  # type: ignore[import-untyped, import-not-found, unused-ignore]

__all__ = ["HAS_DESCRIPTORS", "INTERPRETED", "TensorDescriptor", "jit", "tl"]


# Any: kernels are launched as kernel[grid](...), device functions are called by other kernels; neither has a type that
# a checker could know, because both are compiled from source and never run as Python.
def jit(function: Callable[..., Any]) -> Any:
    """`function` as Triton compiles it, or as its interpreter runs it on CPU tensors under TRITON_INTERPRET=1."""
    return triton.jit(function)


@jit
def _probe() -> None:
    pass


# Triton's interpreter rounds float32 to bfloat16 by truncation, so kernels round for themselves under it.
INTERPRETED: tl.constexpr = tl.constexpr(not isinstance(_probe, JITFunction))
# Tensor descriptors (TMA on Hopper and later) made on the host came with Triton 3.4.
HAS_DESCRIPTORS: bool = find_spec("triton.tools.tensor_descriptor") is not None
TensorDescriptor: Any = import_module("triton.tools.tensor_descriptor").TensorDescriptor if HAS_DESCRIPTORS else None
