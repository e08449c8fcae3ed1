"""Reference versions of sweeps: formulas executed on whole tensors, in float64 if the main is float64.

Slow, on any device, in any float dtype.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from opt_kernels.backends.elements import (
    compute_dtype,
    read_main,
    rounds_stochastically,
    run_of,
    scaled_grad,
    skipped,
    write_main_,
)
from opt_kernels.codecs import Codecs, Plain, narrow, scale_name, without_outliers
from opt_kernels.formulas.formula import Formula
from opt_kernels.works import Batch, Scalar, Skip, Work


class GradStats(NamedTuple):
    """Sums over all elements of all gradients, each a 0-d tensor on their device. Sums over ranks add up."""

    sum_of_squares: Tensor  # float64; of |g|^p for another norm_type p, and the maximum of |g| for infinity
    nonfinite: Tensor  # int64: elements that are infinite or NaN
    zeros: Tensor  # int64: elements equal to zero; 0 if they were not counted


def grad_stats(grads: Sequence[Tensor], *, count_zeros: bool = True, norm_type: float = 2.0) -> GradStats:
    """Compute float64 statistics of `grads`, of any shapes and float dtypes, without modifying them.

    `norm_type` p > 0 (infinity included) gives sum |g|^p, or max |g|. Raises ValueError for any other.
    """
    check_norm_type(norm_type)
    device = grads[0].device if grads else torch.device("cpu")
    power = torch.zeros((), dtype=torch.float64, device=device)
    nonfinite = torch.zeros((), dtype=torch.int64, device=device)
    zeros = torch.zeros_like(nonfinite)
    for grad in grads:
        size = grad.to(torch.float64).abs()
        if math.isinf(norm_type):
            # maximum() keeps NaN where max() of an empty tensor would raise.
            power = torch.maximum(power, torch.cat([size.flatten(), power.view(1)]).max())
        else:
            power = power + size.pow(norm_type).sum()
        nonfinite = nonfinite + (~size.isfinite()).sum()
        if count_zeros:
            zeros = zeros + (size == 0).sum()
    return GradStats(power, nonfinite, zeros)


def check_norm_type(norm_type: float) -> None:
    """Raise ValueError unless `norm_type` is a number above zero, or infinity."""
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type!r} is not a norm; pass a number above 0, or math.inf for the maximum")


def update_(
    batches: Sequence[Batch],  # state: those of the formula, and their "_scale" if the codec has scales
    formula: Formula,
    codecs: Codecs,  # of the states, in the formula's order
    *,
    stochastic_rounding: bool = False,  # a bfloat16 main is rounded stochastically
    grad_scale: Scalar = 1.0,
    skip: Skip = None,
) -> None:
    """Update `main` (or `out` and `remainder`), `out` and the states of every work.

    The main is computed from the new states before these are rounded to their storage format.
    """
    if skipped(skip):
        return
    for hyper, works in batches:
        scalars = formula.scalars_of(hyper)
        for run in [run_of(work, codecs) for work in works]:
            grad = scaled_grad(run, float(grad_scale))
            main, *values = formula.updated(read_main(run, copy=True), grad, decoded(run, codecs), scalars)
            write_(run, main, values, codecs, step=hyper.step, stochastic_rounding=stochastic_rounding)


def decoded(run: Work, codecs: Codecs, *, in_place: bool = False) -> dict[str, Tensor]:
    """The states of a run in its compute dtype: new tensors, or `in_place` the states that are stored in this dtype."""
    dtype = compute_dtype(run)
    values = {}
    for name, codec in codecs.items():
        codes = run.state[name]
        if in_place and isinstance(codec, Plain) and codes.dtype is dtype:
            values[name] = codes
        else:
            values[name] = torch.empty_like(codes, dtype=dtype)
            codec.decode_(values[name], codes, run.state.get(scale_name(name)))
    return values


def write_(
    run: Work,
    main: Tensor,
    values: Sequence[Tensor],  # of the states, in the order of `codecs`
    codecs: Codecs,
    *,
    step: Scalar,
    stochastic_rounding: bool,
) -> None:
    """Write the main and the states of a flat run in their storage formats; zeros for outliers."""
    place = {"first": run.first, "step": int(step)}
    words = None
    if stochastic_rounding and run.main is not None and rounds_stochastically(run.main.dtype):
        words = narrow.noise(len(main), **place, device=main.device)
    write_main_(run, main, words)
    kept = without_outliers([*codecs.values()], values)
    for number, ((name, codec), value) in enumerate(zip(codecs.items(), kept, strict=True), start=1):
        words = None
        if codec.stochastic:
            words = narrow.noise_of_state(
                len(main), **place, number=number, period=codec.noise_period, device=main.device
            )
        codec.encode_(run.state[name], run.state.get(scale_name(name)), value, words)
