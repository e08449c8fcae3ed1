"""Kernels for the scalar arithmetic between the statistics of a step and its update, on devices that have them."""

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from opt_kernels.backends.triton.grad_stats import StatsSweep
    from opt_kernels.backends.triton.verdict import Decisions, RowOfSums, Summand

__all__ = ["MAX_SLOTS", "VerdictKernels", "verdict_kernels"]

MAX_SLOTS = 62  # norm slots: whether each is clipped is a bit of an int64


class VerdictKernels(NamedTuple):
    """Classes and functions of `opt_kernels.backends.triton`."""

    sweep_of: "Callable[[Sequence[Tensor]], StatsSweep | None]"
    Summand: "type[Summand]"
    RowOfSums: "type[RowOfSums]"
    Decisions: "type[Decisions]"
    rescaled: Callable[..., Tensor]  # of loss_scale.py


@cache
def verdict_kernels(device: torch.device) -> VerdictKernels | None:
    """The kernels on `device`; None where torch operations do the same with the same bits."""
    return triton_kernels() if device.type == "cuda" and find_spec("triton") is not None else None


def triton_kernels() -> VerdictKernels:
    """The kernels in Triton. Raises ImportError if Triton is not installed."""
    module = import_module("opt_kernels.backends.triton.verdict")
    return cast(VerdictKernels, module.KERNELS)
