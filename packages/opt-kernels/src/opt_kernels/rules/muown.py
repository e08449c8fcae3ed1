"""Muown: Muon of the directions of a matrix's rows, and Adam of their lengths."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from opt_kernels.matrices import access
from opt_kernels.matrices.muon import MOMENTUM, scale_parts_
from opt_kernels.rules.base import WEIGHTS
from opt_kernels.rules.muon import NewtonSchulzRule
from opt_kernels.rules.whole_matrices import WholeMatrices
from opt_kernels.works import Number, Skip, StateKind, StateSpec, Task

LEAST = 1e-12  # length of a row: rows of zeros have no direction
CHANGED = 2.0**-8
"""The relative difference between the length of a row and its magnitude from which other code has written the row; at
most half of it follows from the rounding of bfloat16 weights."""
OF_ROWS = ("magnitude", "direction_norm", "magnitude_avg", "magnitude_avg_sq")  # states of one number for each row


@dataclass(frozen=True, slots=True, kw_only=True)
class MuownRule(NewtonSchulzRule, WholeMatrices):
    """Muown (Row-Norm Control for Muon, arXiv 2605.10797), as in Emerging-Optimizers.

    Each row of the weights W (m, n) is a magnitude g_i times a unit direction v_i / |v_i|. Of `Hyper`: lr, weight_decay
    wd, step t, momentum mu, betas (b1, b2), eps. For a gradient G, row by row:

        u = W / g;   v = r u                                        r = |v|, of which only the length is kept
        dg = <G, u>;   dv = (g / r)(G - dg u)                       gradients of magnitude and direction
        M <- mu M + (1 - mu) dv                                     momentum_buffer
        v <- v - lr s e Newton-Schulz(M)                            of the whole matrix; r <- |v|
        a <- b1 a + (1 - b1) dg;   c <- b2 c + (1 - b2) dg²
        g <- (g - lr (a / (1 - b1^t)) / (sqrt(c / (1 - b2^t)) + eps)) (1 - lr wd)
        W <- g v / |v|

    where s is the factor of `scale_mode` for (m, n), and e `extra_scale_factor`. Weight decay acts on magnitudes. In
    the first step g = r = |W|, at least 1e-12. So is |g| where other code has changed the length of a row by 0.4 % or
    more since the last step. States are float32: M has the shape of W; g (magnitude), r (direction_norm),
    a (magnitude_avg) and c (magnitude_avg_sq) have one number for each row.

    Split rows are orthogonalised as separate matrices, with their own scales. Reads whole matrices of weights besides
    gradients (`reads_weights`). `update_` raises MatrixError for parts of a matrix.
    """

    name = "muown"
    reads_weights = True
    capturable = True  # a step reads no device tensor on the host
    numbers = (
        Number("momentum", 0.95),
        Number("betas", (0.9, 0.95)),
        Number("eps", 1e-8),
    )
    state_specs = (
        StateSpec(name=MOMENTUM, whole=True),
        *(StateSpec(name=name, kind=StateKind.REDUCED, dims=(-1,), whole=True) for name in OF_ROWS),
    )

    def transform_(self, tasks: Sequence[Task], inputs: Tensor, skip: Skip) -> Tensor:
        """The new weights (len(tasks), *shape), given gradients, and the weights in the state `WEIGHTS`."""
        hyper, work = tasks[0]
        self.check_whole(work)

        def stacked(name: str) -> Tensor:  # a new tensor
            return torch.stack([task.work.state[name].to(inputs.dtype) for task in tasks])

        weights = stacked(WEIGHTS)
        momentum = stacked(MOMENTUM)
        # Numbers of rows are (..., m, 1).
        stored, norm, avg, avg_sq = (stacked(name).unsqueeze(-1) for name in OF_ROWS)
        length = torch.linalg.vector_norm(weights, dim=-1, keepdim=True).clamp_min(LEAST)
        before = stored.abs()
        is_written = (length - before).abs() > CHANGED * before
        magnitude = torch.where(is_written, length, before).copysign(stored)
        norm = torch.where(norm == 0, length, norm)  # in the first step
        unit = weights / magnitude
        grad_of_magnitude = (inputs * unit).sum(-1, keepdim=True)
        tangent = inputs - grad_of_magnitude * unit
        if unit.shape[-1] == 1:  # a single element has no tangent but rounding errors
            tangent.zero_()
            momentum.zero_()
        momentum.lerp_(magnitude / norm * tangent, access.weight_for(momentum, 1.0 - hyper.momentum))
        steps = self.directions(tasks, momentum, False)
        scale_parts_(work, steps, self.scales(work))
        direction = norm * unit - hyper.lr * steps
        norm = torch.linalg.vector_norm(direction, dim=-1, keepdim=True).clamp_min(LEAST)
        beta1, beta2 = hyper.betas
        avg.lerp_(grad_of_magnitude, access.weight_for(avg, 1.0 - beta1))
        avg_sq.lerp_(grad_of_magnitude.square(), access.weight_for(avg_sq, 1.0 - beta2))
        step = hyper.step.double() if isinstance(hyper.step, Tensor) else hyper.step
        mean = avg / (1.0 - beta1**step)
        mean_sq = avg_sq / (1.0 - beta2**step)
        magnitude = magnitude - hyper.lr * (mean / (mean_sq.sqrt() + hyper.eps))
        magnitude = magnitude * (1.0 - hyper.lr * hyper.weight_decay)
        for name, values in zip((MOMENTUM, *OF_ROWS), (momentum, magnitude, norm, avg, avg_sq), strict=True):
            kept = [task.work.state[name] for task in tasks]
            access.assign_(kept, values.view(-1, *kept[0].shape), skip)
        moved: Tensor = magnitude / norm * direction
        return moved

    def apply_(self, task: Task, update: Tensor, skip: Skip) -> None:
        """Write the new weights."""
        access.write_main_(task.work, update, skip)
