"""Chooses the version of an operation: the one given explicitly, else the one for the device.

All versions of an operation have the same functions with the same signatures. An operation with a Triton version uses
it on GPUs; one with a C++ version uses it on CPUs if there is a compiler. Versions are imported at their first use, so
that Triton and the compiler are needed only where they run.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from opt_kernels.backends.cpp.compiler import usable
from opt_kernels.backends.reference import GradStats
from opt_kernels.works import Batch, Works


class Backend(Enum):
    """A version of an operation, by the name that users pass."""

    REFERENCE = "reference"  # the formula as written: slow, any device, any float dtype
    TORCH = "torch"  # torch's own operations: any device
    CPP = "cpp"  # one compiled pass for all tensors: CPUs, where a C++ compiler is installed
    TRITON = "triton"  # one kernel for all tensors: GPUs, or the interpreter


_LOG = logging.getLogger(__name__)
_ELEMENTWISE = {Backend.REFERENCE: "backends.reference", Backend.TORCH: "backends.torch_native"}
# The module of each version.
_VERSIONS: Mapping[str, Mapping[Backend, str]] = {
    "update": {**_ELEMENTWISE, Backend.CPP: "backends.cpp.update", Backend.TRITON: "backends.triton.update"},
    "grad_stats": {
        **_ELEMENTWISE,
        Backend.CPP: "backends.cpp.grad_stats",
        Backend.TRITON: "backends.triton.grad_stats",
    },
    "muon": {
        Backend.REFERENCE: "rules.whole_matrices",
        Backend.TORCH: "rules.whole_matrices",
        Backend.TRITON: "matrices.muon.triton",
    },
    "syrk": {Backend.TORCH: "matrices.syrk", Backend.CPP: "matrices.syrk.cpp", Backend.TRITON: "matrices.syrk.triton"},
}
_DEVICE_BACKENDS = {"cuda": Backend.TRITON, "cpu": Backend.CPP}  # other devices: torch operations
# What a backend requires, checked at its first use.
_REQUIRED: dict[Backend, Callable[[], bool]] = {
    Backend.TRITON: lambda: find_spec("triton") is not None,
    Backend.CPP: usable,
}
_HOW_TO_INSTALL = {Backend.TRITON: "install triton", Backend.CPP: "install a C++ compiler, or name it in CXX"}


class BackendError(ValueError):
    """A backend that is unknown or not available."""


def parse_backend(name: str | None) -> Backend | None:
    """Return the backend of this name; None for None. Raises BackendError for an unknown name."""
    if name is None:
        return None
    try:
        return Backend(name)
    except ValueError:
        allowed = ", ".join(repr(backend.value) for backend in Backend)
        raise BackendError(f"backend={name!r} is unknown; pass one of {allowed}, or None to choose by device") from None


def check_backend(name: str | None, op: str) -> None:
    """Raise BackendError for an unknown backend, and for one that the operation `op` has no version for.

    An operation that is not in the table of versions is written in torch operations.
    """
    chosen = parse_backend(name)
    versions = _VERSIONS.get(op, (Backend.REFERENCE, Backend.TORCH))
    if chosen is not None and chosen not in versions:
        allowed = ", ".join(repr(backend.value) for backend in versions)
        raise BackendError(
            f"backend={name!r} is not available for {op!r}; pass one of {allowed}, or None to choose by device"
        )


def check_installed(name: str | None) -> None:
    """Raise BackendError if the backend of this name needs something that is not installed."""
    chosen = parse_backend(name)
    if chosen is not None and not _available(chosen):
        raise BackendError(
            f"backend={name!r} is not available: {_HOW_TO_INSTALL[chosen]}, or pass backend=None to choose by device"
        )


def version(op: str, function: str, *, backend: str | None, tensors: Sequence[Tensor]) -> Callable[..., Any]:
    """Return `function` of the operation `op` in the version `backend`; None: the default for the device.

    Raises BackendError if that version does not exist or its requirement is not installed.
    """
    return _chosen(op, function, backend, tensors[0].device.type if tensors else None)


@cache  # every step asks several times
def _chosen(op: str, function: str, backend: str | None, device: str | None) -> Callable[..., Any]:
    chosen = parse_backend(backend) or _default_backend(op, device)
    if chosen not in _VERSIONS.get(op, {}):
        raise BackendError(
            f"backend={chosen.value!r} is not available for {op!r}; pass backend=None to choose by device"
        )
    check_installed(chosen.value)
    if chosen is Backend.CPP and device not in ("cpu", None):
        raise BackendError(
            f"backend='cpp' with tensors on {device}: it sweeps CPU memory; pass backend=None to choose by device"
        )
    return _function(op, function, chosen)


def _default_backend(op: str, device: str | None) -> Backend:
    """Return the backend for a device type. None, without tensors: torch, so that nothing is compiled for them."""
    backend = _DEVICE_BACKENDS.get(device or "", Backend.TORCH)
    if backend not in _VERSIONS[op]:
        return Backend.TORCH
    if not _available(backend):
        if backend is Backend.TRITON:
            _warn_without_triton()
        return Backend.TORCH
    return backend


@cache  # warns once; `usable` logs a missing compiler
def _warn_without_triton() -> None:
    _LOG.warning(
        "Triton is not installed: steps on GPUs run on torch's operations, with many launches and several passes over "
        "memory instead of one; install triton"
    )


@cache
def _available(backend: Backend) -> bool:
    return backend not in _REQUIRED or _REQUIRED[backend]()


@cache  # logs once which version runs
def _function(op: str, function: str, backend: Backend) -> Callable[..., Any]:
    module = _VERSIONS[op][backend]
    _LOG.info("%s runs as %s.%s", op, module, function)
    loaded: Callable[..., Any] = vars(import_module(f"opt_kernels.{module}"))[function]
    return loaded


def grad_stats(
    grads: Sequence[Tensor], *, count_zeros: bool = True, norm_type: float = 2.0, backend: str | None = None
) -> GradStats:
    """Compute the statistics of `grads` (any shapes, any float dtypes, read only), by the version for their device.

    For a `norm_type` other than 2, `sum_of_squares` is the sum of |g|^norm_type; for infinity, the maximum of |g|.
    Raises ValueError unless `norm_type` is above 0, and BackendError for a `backend` that is not available.
    """
    sweep = version("grad_stats", "grad_stats", backend=backend, tensors=grads)
    stats: GradStats = sweep(grads, count_zeros=count_zeros, norm_type=norm_type)
    return stats


def tensors_of(batches: Sequence[Batch]) -> list[Tensor]:
    """Return the first gradient of the batches, which determines the device, as a list; empty if they have no works."""
    for _, works in batches:
        if works:
            return [works.grads[0] if isinstance(works, Works) else works[0].grad]
    return []
