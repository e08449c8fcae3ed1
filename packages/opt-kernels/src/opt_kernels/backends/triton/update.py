"""A formula as one Triton sweep over the chunk table: its kernels, launched for every combination of dtypes."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from torch import Tensor

from opt_kernels.backends.triton.calls import UpdateCall, may_repeat
from opt_kernels.backends.triton.formats import LaunchFormats, rounds_stochastically, triton_dtype
from opt_kernels.backends.triton.kernels import kernels_of
from opt_kernels.backends.triton.quantize import scheme
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
) -> list[UpdateCall]:
    """Do what `reference.update_` does, on the device of the tensors, without synchronizing; may be captured.

    Returns the launches for `Rule.update_`.

    Raises LayoutError for a dtype that Triton cannot sweep, and FrozenHyperError for host numbers in a capture.
    """
    of_codecs = tuple(codecs.items())
    call = UpdateCall(
        kernels_of(formula), batches, codecs, lambda formats: _options(formats, of_codecs, stochastic_rounding),
        grad_scale=grad_scale, skip=skip,
    )  # fmt: skip
    call.launch()
    return [call] if call.is_in_place and may_repeat(batches) and call.holds() else []


@cache
def _options(
    formats: LaunchFormats, codecs: tuple[tuple[str, StateCodec], ...], stochastic_rounding: bool
) -> dict[str, Any]:
    rounds = rounds_stochastically(formats, stochastic_rounding)
    return state_options(formats, dict(codecs)) | {"STOCHASTIC_ROUNDING": rounds}


def state_options(formats: LaunchFormats, codecs: Mapping[str, StateCodec]) -> dict[str, Any]:
    """The arguments of a sweep that describe its states."""
    options: dict[str, Any] = {}
    lane = 2 + len(codecs)  # after main, out and the states: the scales of those that have any
    for index, (codec, dtype) in enumerate(zip(codecs.values(), formats.states, strict=True)):
        options[f"STATE{index}"] = triton_dtype(dtype)
        options[f"SCHEME{index}"] = scheme(codec)
        options[f"SCALE{index}"] = lane if codec.block else 0
        lane += codec.block > 0
    return options
