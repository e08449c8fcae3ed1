"""Lion as its paper has it, in torch: the formula that every fast version is tested against.

With g the scaled gradient and m the momentum (Chen et al. 2023, algorithm 2):

    u = sign(b1 * m + (1 - b1) * g)        sign(0) = 0, sign(NaN) = NaN
    p <- p - lr * (u + wd * p)
    m <- b2 * m + (1 - b2) * g
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from opt_kernels.codecs import StateCodec, scale_name
from opt_kernels.ops.elements import on_host, read_main, run_of, scaled_grad, skipped, write_main_
from opt_kernels.rules.base import Batch


def lion_(
    batches: Sequence[Batch],  # state: "exp_avg", and its "_scale" where the codec has scales
    *,
    exp_avg_codec: StateCodec,
    grad_scale: float | Tensor = 1.0,
    skip: Tensor | None = None,
) -> None:
    """Updates `main` (or `out` and `remainder`), `out` and `exp_avg` of every work; in float32 or float64."""
    if skipped(skip):
        return
    for hyper, works in batches:
        row = on_host(hyper)
        beta1, beta2 = row.betas
        for run in [run_of(work, ("exp_avg",)) for work in works]:
            p, g = read_main(run), scaled_grad(run, float(grad_scale))
            codes, scales = run.state["exp_avg"], run.state.get(scale_name("exp_avg"))
            m = p.clone()
            exp_avg_codec.decode_(m, codes, scales)
            u = sign_(beta1 * m + (1 - beta1) * g)
            write_main_(run, p * (1 - row.lr * row.weight_decay) - row.lr * u)
            exp_avg_codec.encode_(codes, scales, beta2 * m + (1 - beta2) * g)


def sign_(x: Tensor) -> Tensor:
    """Writes x's sign over it; torch's own makes 0 of NaN, and a diverged weight would look like one at rest."""
    return torch.where(x.isnan(), x, x.sign(), out=x)
