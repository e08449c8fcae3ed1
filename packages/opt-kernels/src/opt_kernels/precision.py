"""The precision of float32 matrix products: set for the time of a computation, and set back.

torch keeps it in one place for the whole process, in two APIs: `set_float32_matmul_precision`, and since torch 2.9
`torch.backends.*.fp32_precision`. The older one raises once a user has set something through the newer one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition
from typing import Any, NamedTuple

import torch

from opt_kernels.choice import Choice


class MatmulPrecision(Choice):
    """In what the matrix products are done; the names are torch's."""

    MEDIUM = "medium"  # 16 bits: fp16 on GPUs (three more bits, and normalised numbers need no range), bf16 elsewhere
    HIGH = "high"  # fp32 numbers, TF32 products where the device has them
    HIGHEST = "highest"  # fp32


class _Setting(NamedTuple):
    """What a user has set, in both APIs; None where an API is missing or cannot be read."""

    legacy: str | None
    newer: tuple[str, ...] | None  # of `_switches()`


class _Guard:
    """Lets threads that want the same precision in together, and others wait until these have left."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._wanted = MatmulPrecision.HIGHEST
        self._users = 0
        self._found = _Setting(None, None)

    def enter(self, wanted: MatmulPrecision) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._users or self._wanted is wanted)
            if not self._users:
                self._found = _read()
                _set(self._found, wanted)
            self._wanted = wanted
            self._users += 1

    def leave(self) -> None:
        with self._changed:
            self._users -= 1
            if not self._users:
                _restore(self._found)
                self._changed.notify_all()


_GUARD = _Guard()  # one, because what it guards is one setting of the process


@contextmanager
def fp32_products(precision: MatmulPrecision) -> Iterator[None]:
    """Run the block with float32 matrix products in `precision`, "high" or "highest", whatever the user has set.

    Other threads that enter with another precision wait for this block to end.
    """
    _GUARD.enter(precision)
    try:
        yield
    finally:
        _GUARD.leave()


def tf32_products() -> bool:
    """Whether float32 matrix products on GPUs are TF32 ones now."""
    if _has_newer():
        return bool(_switches()[0].fp32_precision == "tf32")
    return torch.get_float32_matmul_precision() != "highest"


def _has_newer() -> bool:
    return hasattr(torch.backends.cuda.matmul, "fp32_precision")


def _switches() -> list[Any]:
    """Of the newer API: products of CUDA, and of oneDNN on CPUs."""
    return [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]  # type: ignore[attr-defined, unused-ignore]


def _inherited() -> list[str]:
    """What each of `_switches` is where it is "none"."""
    return [torch.backends.cudnn.fp32_precision, torch.backends.mkldnn.fp32_precision]


def _read() -> _Setting:
    try:
        legacy = torch.get_float32_matmul_precision()
    except RuntimeError:  # the user has set something through the newer API
        legacy = None
    if not _has_newer():
        return _Setting(legacy, None)
    # A switch that equals what it inherits is taken to inherit: written out, it would no longer follow the user.
    found = [switch.fp32_precision for switch in _switches()]
    return _Setting(legacy, tuple("none" if own == above else own for own, above in zip(found, _inherited())))


def _set(found: _Setting, wanted: MatmulPrecision) -> None:
    """Through the older API where it works, so that whoever reads it meanwhile is not refused."""
    if found.legacy is not None:
        if found.legacy != wanted.value:
            torch.set_float32_matmul_precision(wanted.value)
        return
    for switch in _switches():
        switch.fp32_precision = "tf32" if wanted is MatmulPrecision.HIGH else "ieee"


def _restore(found: _Setting) -> None:
    if found.legacy is not None:
        torch.set_float32_matmul_precision(found.legacy)
    for switch, own in zip(_switches() if found.newer is not None else (), found.newer or ()):
        switch.fp32_precision = own
