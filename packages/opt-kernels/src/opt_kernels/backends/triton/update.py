"""A formula as one Triton sweep over the chunk table: its kernels, launched for every combination of dtypes."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from opt_kernels import devices
from opt_kernels.backends.columns import in_order, parts_of
from opt_kernels.backends.triton.formats import LaunchFormats, rounds_stochastically, triton_dtype
from opt_kernels.backends.triton.kernels import kernels_of
from opt_kernels.backends.triton.launches import cut_sweeps, launch_options, sweeps
from opt_kernels.backends.triton.quantize import scheme
from opt_kernels.backends.triton.scalars import fill_arguments
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
    """Do what `reference.update_` does, on the device of the tensors, without synchronizing; may be captured.

    One launch for the scalar block, and one of the sweep for every combination of dtypes among the works.

    Raises LayoutError for a dtype that Triton cannot sweep, and FrozenHyperError for host numbers in a capture.
    """
    launches = cut_sweeps(parts_of(batches), codecs)
    if launches is None:
        batches = in_order(batches, tuple(codecs))  # tables hold addresses only: the copies live until the launch
        launches = sweeps(batches, codecs)
    if not launches:
        return
    device, kernels, of_codecs = launches[0].table.grads.device, kernels_of(formula), tuple(codecs.items())
    with devices.launching_on(device):
        rows = [
            (hyper.lr, hyper.weight_decay, hyper.step, grad_scale, *[read(hyper) for read in kernels.own])
            for hyper, _ in batches
        ]
        block = torch.empty((len(rows), kernels.row_width), dtype=torch.float32, device=device)
        kernels.fill[(len(rows),)](block, *fill_arguments(rows, skip=skip, device=device))
        for formats, table, _ in launches:
            options = {**_options(formats, of_codecs, stochastic_rounding), **launch_options(formats, table)}
            kernels.sweep[(table.num_chunks,)](table.records, table.grads, block, **options)


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
