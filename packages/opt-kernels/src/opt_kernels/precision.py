"""The precision of matrix products: set for a block of code, whatever the caller's settings, and restored after it.

torch has one setting for float32 products per process, with two APIs: `set_float32_matmul_precision`, and since torch
2.9 `torch.backends.*.fp32_precision`. The older API raises once a user has used the newer one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Condition, local
from typing import Any, NamedTuple

import torch

from opt_kernels.works import NamedChoice

__all__ = ["MatmulPrecision", "fp32_products", "multiplies_bfloat16", "tf32_products", "without_autocast"]


class MatmulPrecision(NamedChoice):
    """The precision of matrix products, with torch's names."""

    # 16 bits: fp16 on GPUs (three more bits; normalised matrices need no range), bf16 elsewhere; each product in fp32
    # and rounded on processors that do not multiply it
    MEDIUM = "medium"
    HIGH = "high"  # fp32 operands, TF32 products if the device supports them
    HIGHEST = "highest"  # fp32


class _Setting(NamedTuple):
    """The user's setting in both APIs."""

    legacy: str | None  # None if it cannot be read
    newer: tuple[str, ...] = ()  # of `_switches()`


class _Guard:
    """Admits threads with the same precision together; others wait until these have left.

    A thread inside a block may enter again with the same precision only: with another it would wait for itself.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._wanted = MatmulPrecision.HIGHEST
        self._users = 0
        self._before = _Setting(None)
        self._thread = local()  # .depth: blocks that this thread is in

    def enter(self, wanted: MatmulPrecision) -> None:
        depth = getattr(self._thread, "depth", 0)
        if depth and self._wanted is not wanted:
            raise ValueError(
                f"products of precision {wanted.value!r} inside a block of precision {self._wanted.value!r} in the "
                "same thread; nested blocks must have the same precision: end the outer block first"
            )
        self._thread.depth = depth + 1
        with self._changed:
            self._changed.wait_for(lambda: not self._users or self._wanted is wanted)
            if not self._users:
                self._before = _read()
                _set(self._before, wanted)
            self._wanted = wanted
            self._users += 1

    def leave(self) -> None:
        self._thread.depth -= 1
        with self._changed:
            self._users -= 1
            if not self._users:
                _restore(self._before)
                self._changed.notify_all()


_GUARD = _Guard()  # a single guard, because the setting is process-wide


@contextmanager
def fp32_products(precision: MatmulPrecision) -> Iterator[None]:
    """Run the block with float32 matrix products in `precision`, "high" or "highest", whatever the user's setting.

    Other threads that enter with another precision wait for this block to end. Raises ValueError inside a block of
    another precision in the same thread.
    """
    _GUARD.enter(precision)
    try:
        yield
    finally:
        _GUARD.leave()


@contextmanager
def without_autocast() -> Iterator[None]:
    """Run a block that writes weights as outside of `torch.autocast`: operations keep the dtypes of their operands.

    The 16-bit copies of weights that an enclosing region caches are dropped afterwards: the next forward in that region
    would use the old weights.
    """
    try:
        with torch._C._DisableAutocast():
            yield
    finally:
        torch.clear_autocast_cache()


@cache
def multiplies_bfloat16() -> bool:
    """Whether torch has matrix products of bfloat16 for this processor, those of oneDNN: its others take up to 36 times
    as long as in float32."""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return supported is not None and bool(supported())


def tf32_products() -> bool:
    """Whether float32 matrix products on GPUs currently use TF32."""
    switches = _switches()
    return bool(switches[0].fp32_precision == "tf32") if switches else torch.get_float32_matmul_precision() != "highest"


def _switches() -> list[Any]:
    """The settings of the newer API: matrix products of CUDA, and of oneDNN on CPUs. Empty in torch before 2.9."""
    known = [torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)]
    return known if hasattr(known[0], "fp32_precision") else []


def _read() -> _Setting:
    try:
        legacy = torch.get_float32_matmul_precision()
    except RuntimeError:  # the user has set something through the newer API
        legacy = None
    if not _switches():
        return _Setting(legacy)
    # A switch that equals the value it inherits while it is "none" is taken to inherit it: if set, it would no longer
    # follow the user.
    inherited = (torch.backends.cudnn.fp32_precision, torch.backends.mkldnn.fp32_precision)
    found = []
    for switch, above in zip(_switches(), inherited):
        value = switch.fp32_precision
        found.append("none" if value == above else value)
    return _Setting(legacy, tuple(found))


def _set(before: _Setting, wanted: MatmulPrecision) -> None:
    """Use the older API if it works, so that code that reads it in the meantime does not raise."""
    if before.legacy is None:
        for switch in _switches():
            switch.fp32_precision = "tf32" if wanted is MatmulPrecision.HIGH else "ieee"
    elif before.legacy != wanted.value:
        torch.set_float32_matmul_precision(wanted.value)


def _restore(before: _Setting) -> None:
    if before.legacy is not None:
        torch.set_float32_matmul_precision(before.legacy)
    for switch, value in zip(_switches(), before.newer):
        switch.fp32_precision = value
