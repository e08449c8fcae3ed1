"""One kernel for all tensors, on GPUs or under the interpreter.

No other module imports Triton. Importing this raises ImportError if it is not installed.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]
from triton.runtime.jit import JITFunction  # type: ignore[import-untyped, import-not-found, unused-ignore]

__all__ = ["HAS_DESCRIPTORS", "INTERPRETED", "TensorDescriptor", "jit", "jit_once", "tl"]


# Returns Any: kernels are launched as kernel[grid](...), and device functions are called by other kernels. Neither has
# a type that a checker could know, because both are compiled from source and never run as Python.
def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit`: compiles `function`, or with TRITON_INTERPRET=1 interprets it on CPU tensors."""
    return triton.jit(function)


def jit_once(*, numbers: Sequence[str] = (), addresses: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """`jit` for a kernel that is not compiled again if these numbers are 1 or divisible by 16, or these addresses are
    aligned."""
    decorator: Callable[[Callable[..., Any]], Any] = triton.jit(
        do_not_specialize=numbers, do_not_specialize_on_alignment=addresses
    )
    return decorator


@jit
def _probe() -> None:
    pass


# Triton's interpreter truncates float32 to bfloat16, so kernels round explicitly under it.
INTERPRETED: tl.constexpr = tl.constexpr(not isinstance(_probe, JITFunction))
# Tensor descriptors (TMA on Hopper and later) that are created on the host need Triton 3.4.
HAS_DESCRIPTORS: bool = find_spec("triton.tools.tensor_descriptor") is not None
TensorDescriptor: Any = import_module("triton.tools.tensor_descriptor").TensorDescriptor if HAS_DESCRIPTORS else None
