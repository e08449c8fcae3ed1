"""Adam and AdamW as their papers have them, in torch: the formula that every fast version is tested against.

With g the scaled gradient, t the step (from 1), and m, v the moments (Kingma & Ba 2015, algorithm 1; AdamW, Loshchilov
& Hutter 2019, algorithm 2):

    g <- g + wd * p            only where weight decay is not decoupled
    p <- p - lr * wd * p       only where it is
    m <- m + (1 - b1) * (g - m)
    v <- b2 * v + (1 - b2) * g^2

    order "torch":  p <- p - (lr / (1 - b1^t)) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)
    order "te":     p <- p - lr * ((m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + wd * p)

The two orders agree but for rounding: the first is torch.optim.AdamW's, the second Transformer Engine's, which decays
within the update. `p` takes the new moments before they are rounded to what they are stored in.
"""

import math
from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from opt_kernels.codecs import StateCodec, scale_name
from opt_kernels.ops.elements import HostHyper, Run, on_host, read_main, run_of, scaled_grad, skipped, write_main_
from opt_kernels.rules.base import Batch

Order = Literal["torch", "te"]


def adam_(
    batches: Sequence[Batch],  # state: "exp_avg", "exp_avg_sq", and their "_scale" where the codec has scales
    *,
    decoupled: bool,
    order: Order,
    exp_avg_codec: StateCodec,
    exp_avg_sq_codec: StateCodec,
    stochastic_rounding: bool = False,
    grad_scale: float | Tensor = 1.0,
    skip: Tensor | None = None,
) -> None:
    """Updates `main` (or `out` and `remainder`), `out` and the moments of every work; in float32 or float64."""
    if skipped(skip):
        return
    for hyper, works in batches:
        row = on_host(hyper)
        for run in [run_of(work, ("exp_avg", "exp_avg_sq")) for work in works]:
            m = _decoded(run, "exp_avg", exp_avg_codec)
            v = _decoded(run, "exp_avg_sq", exp_avg_sq_codec)
            p = updated(
                read_main(run), scaled_grad(run, float(grad_scale)), m, v, row, decoupled=decoupled, order=order
            )
            write_main_(run, p, stochastic_step=int(row.step) if stochastic_rounding else None)
            exp_avg_codec.encode_(run.state["exp_avg"], run.state.get(scale_name("exp_avg")), m)
            exp_avg_sq_codec.encode_(run.state["exp_avg_sq"], run.state.get(scale_name("exp_avg_sq")), v)


def updated(
    p: Tensor,  # (n,)
    g: Tensor,  # (n,)
    m: Tensor,  # (n,)  updated
    v: Tensor,  # (n,)  updated
    row: HostHyper,
    *,
    decoupled: bool,
    order: Order,
) -> Tensor:
    """The new parameter, by the formula above."""
    beta1, beta2 = row.betas
    correction1, correction2 = 1 - math.pow(beta1, row.step), 1 - math.pow(beta2, row.step)
    decays = row.weight_decay != 0  # zero times an infinite parameter would be NaN
    if decays and not decoupled:
        g = g + row.weight_decay * p
    m.copy_(m + (1 - beta1) * (g - m))
    v.copy_(beta2 * v + (1 - beta2) * g * g)
    decay = row.weight_decay * p if decays and decoupled else p.new_zeros(())
    if order == "te":
        return p - row.lr * ((m / correction1) / ((v / correction2).sqrt() + row.eps) + decay)
    step_size = row.lr / correction1
    return p - row.lr * decay - step_size * m / (v.sqrt() / math.sqrt(correction2) + row.eps)


def _decoded(run: Run, name: str, codec: StateCodec) -> Tensor:
    codes = run.state[name]
    values = read_main(run)
    codec.decode_(values, codes, run.state.get(scale_name(name)))
    return values
