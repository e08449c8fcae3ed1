"""SGD with momentum, in torch: the formula that every fast version is tested against.

With g the scaled gradient and b the momentum buffer (Sutskever et al. 2013, in the form of torch.optim.SGD):

    g <- g + wd * p
    b <- g at the first step, then  momentum * b + (1 - dampening) * g
    g <- g + momentum * b  where nesterov, else  b
    p <- p - lr * g

Without a buffer, or at momentum zero, the second and third lines fall away and the buffer rests.
"""

from collections.abc import Sequence

from torch import Tensor

from opt_kernels.codecs import StateCodec, scale_name
from opt_kernels.ops.elements import HostHyper, on_host, read_main, run_of, scaled_grad, skipped, write_main_
from opt_kernels.rules.base import Batch


def sgd_(
    batches: Sequence[Batch],  # state: "momentum_buffer", and its "_scale" where the codec has scales
    *,
    nesterov: bool,
    dampening: float,
    momentum_buffer_codec: StateCodec | None,  # None: plain descent, no state
    grad_scale: float | Tensor = 1.0,
    skip: Tensor | None = None,
) -> None:
    """Updates `main` (or `out` and `remainder`), `out` and the buffer of every work; in float32 or float64."""
    if skipped(skip):
        return
    for hyper, works in batches:
        row = on_host(hyper)
        for run in map(run_of, works):
            p = read_main(run)
            g = scaled_grad(run, float(grad_scale))
            if row.weight_decay:  # zero times an infinite parameter would be NaN
                g.add_(p, alpha=row.weight_decay)
            if momentum_buffer_codec is not None and row.momentum != 0:
                codes, scales = run.state["momentum_buffer"], run.state.get(scale_name("momentum_buffer"))
                buffer = p.clone()
                momentum_buffer_codec.decode_(buffer, codes, scales)
                buffer = accumulated(buffer, g, row, dampening=dampening)
                momentum_buffer_codec.encode_(codes, scales, buffer)
                g = g + row.momentum * buffer if nesterov else buffer
            write_main_(run, p - row.lr * g)


def accumulated(buffer: Tensor, g: Tensor, row: HostHyper, *, dampening: float) -> Tensor:
    """The new momentum buffer."""
    return g.clone() if row.step == 1 else row.momentum * buffer + (1 - dampening) * g
