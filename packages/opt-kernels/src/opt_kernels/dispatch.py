"""Which version of an operation runs: an explicit choice always wins, else the device decides.

An operation is a directory of `ops`; its versions are its modules `reference`, `torch_native` and `triton`, which have
the same functions with the same signatures. A `triton` module in an operation's directory is all it takes to be chosen
on GPUs. A version is imported when it is first used, so that Triton is needed only where it runs.
"""

import logging
from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from opt_kernels.rules.base import Batch


class Backend(Enum):
    """A version of an operation, by the name users give."""

    REFERENCE = "reference"  # the formula: slow, any device, any float dtype
    TORCH = "torch"  # torch's own operations: any device
    TRITON = "triton"  # one kernel for all tensors: GPUs, or the interpreter


_LOG = logging.getLogger(__name__)
_MODULES = {Backend.REFERENCE: "reference", Backend.TORCH: "torch_native", Backend.TRITON: "triton"}


class BackendError(ValueError):
    """A backend that was asked for by name cannot be had."""


def parse_backend(name: str | None) -> Backend | None:
    """The backend of that name; None for None. Raises BackendError for any other name."""
    if name is None:
        return None
    try:
        return Backend(name)
    except ValueError:
        allowed = ", ".join(repr(backend.value) for backend in Backend)
        raise BackendError(f"backend={name!r} is unknown; give one of {allowed}, or None to choose by device") from None


def version(op: str, function: str, *, backend: str | None, tensors: Sequence[Tensor]) -> Callable[..., Any]:
    """`function` of the operation `op`, in the version that `backend` names or, for None, that suits the device.

    Raises BackendError where the named version does not exist or its package is not installed.
    """
    chosen = parse_backend(backend) or _suited(op, tensors)
    if not _available(op, chosen):
        raise BackendError(
            f"backend={chosen.value!r} is not available for {op!r}: "
            + ("install triton" if find_spec("triton") is None else "this operation has no such version")
            + ", or give backend=None to choose by device"
        )
    return _function(op, function, chosen)


def tensors_of(batches: Sequence[Batch]) -> list[Tensor]:
    """One gradient of the batches, if they have any: it stands for the device of all."""
    return next(([work.grad] for _, works in batches for work in works), [])


def _suited(op: str, tensors: Sequence[Tensor]) -> Backend:
    on_gpu = bool(tensors) and tensors[0].is_cuda
    return Backend.TRITON if on_gpu and _available(op, Backend.TRITON) else Backend.TORCH


@cache
def _available(op: str, backend: Backend) -> bool:
    if backend is Backend.TRITON and find_spec("triton") is None:
        return False
    package = f"opt_kernels.ops.{op}"
    return find_spec(package) is not None and find_spec(f"{package}.{_MODULES[backend]}") is not None


@cache  # so that the log says once which version runs
def _function(op: str, function: str, backend: Backend) -> Callable[..., Any]:
    _LOG.info("%s runs as %s.%s", op, _MODULES[backend], function)
    found: Callable[..., Any] = vars(import_module(f"opt_kernels.ops.{op}.{_MODULES[backend]}"))[function]
    return found
