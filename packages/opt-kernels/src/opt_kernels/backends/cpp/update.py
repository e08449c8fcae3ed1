"""A formula in one compiled pass over memory. Formats that no sweep supports use torch operations."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from opt_kernels.backends.cpp import sweep
from opt_kernels.backends.elements import skipped
from opt_kernels.backends.torch_native import update as torch_native
from opt_kernels.codecs import StateCodec
from opt_kernels.formulas.formula import Formula
from opt_kernels.works import Batch


def update_(
    batches: Sequence[Batch],
    formula: Formula,
    codecs: Mapping[str, StateCodec],
    *,
    stochastic_rounding: bool = False,
    grad_scale: float | Tensor = 1.0,
    skip: Tensor | None = None,
) -> None:
    """Same as `reference.update_`, except for the last bits."""
    if skipped(skip):
        return
    scale = float(grad_scale)
    others = sweep.update_(batches, formula, codecs, grad_scale=scale, stochastic_rounding=stochastic_rounding)
    if others:
        torch_native.update_(others, formula, codecs, stochastic_rounding=stochastic_rounding, grad_scale=scale)
