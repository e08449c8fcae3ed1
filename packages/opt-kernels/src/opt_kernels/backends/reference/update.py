"""Reference version of updates: a formula executed on whole tensors, in float64 if the main is float64."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from opt_kernels.backends.elements import Run, compute_dtype, read_main, run_of, scaled_grad, skipped, write_main_
from opt_kernels.codecs import StateCodec, scale_name
from opt_kernels.formulas.formula import Formula
from opt_kernels.works import Batch


def update_(
    batches: Sequence[Batch],  # state: those of the formula, and their "_scale" if the codec has scales
    formula: Formula,
    codecs: Mapping[str, StateCodec],  # of the states, in the formula's order
    *,
    stochastic_rounding: bool = False,  # a bfloat16 main is rounded stochastically
    grad_scale: float | Tensor = 1.0,
    skip: Tensor | None = None,
) -> None:
    """Update `main` (or `out` and `remainder`), `out` and the states of every work.

    The main is computed from the new states before these are rounded to their storage format.
    """
    if skipped(skip):
        return
    for hyper, works in batches:
        scalars = formula.scalars_of(hyper)
        stochastic_step = int(hyper.step) if stochastic_rounding else None
        for run in [run_of(work, tuple(codecs)) for work in works]:
            states = {name: _decoded(run, name, codec) for name, codec in codecs.items()}
            main, *values = formula.updated(read_main(run), scaled_grad(run, float(grad_scale)), states, scalars)
            write_main_(run, main, stochastic_step=stochastic_step)
            for (name, codec), value in zip(codecs.items(), values, strict=True):
                codec.encode_(run.state[name], run.state.get(scale_name(name)), value)


def _decoded(run: Run, name: str, codec: StateCodec) -> Tensor:
    codes = run.state[name]
    values = torch.empty_like(codes, dtype=compute_dtype(run))
    codec.decode_(values, codes, run.state.get(scale_name(name)))
    return values
