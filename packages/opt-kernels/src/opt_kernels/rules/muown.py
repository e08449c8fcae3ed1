"""Muown: Muon of the directions of a matrix's rows, and Adam of their lengths."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from opt_kernels.backends.elements import read_main
from opt_kernels.matrices import access
from opt_kernels.matrices.coefficients import Coefficients, CoefficientType
from opt_kernels.matrices.muon import MOMENTUM, ScaleMode, scale_parts_
from opt_kernels.matrices.orthogonalization import MatmulPrecision
from opt_kernels.rules.base import WEIGHTS, WholeMatrices, check_states
from opt_kernels.rules.muon import MuonRule
from opt_kernels.works import Batch, Hyper, Number, StateKind, StateSpec, Task, Work

LEAST = 1e-12  # length of a row: rows of zeros have no direction
CHANGED = 2.0**-8
"""The relative difference between the length of a row and its magnitude from which other code has written the row; at
most half of it follows from the rounding of bfloat16 weights."""
MAGNITUDE = "magnitude"
DIRECTION_NORM = "direction_norm"
MAGNITUDE_AVG = "magnitude_avg"
MAGNITUDE_AVG_SQ = "magnitude_avg_sq"
OF_ROWS = (MAGNITUDE, DIRECTION_NORM, MAGNITUDE_AVG, MAGNITUDE_AVG_SQ)  # one number for each row


@dataclass(frozen=True, slots=True, kw_only=True)
class MuownRule(WholeMatrices):
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

    scale_mode: ScaleMode = ScaleMode.SPECTRAL
    extra_scale_factor: float = 1.0
    coefficient_type: CoefficientType = CoefficientType.QUINTIC
    custom_coefficients: tuple[Coefficients, ...] = ()  # with CoefficientType.CUSTOM, repeated in a cycle
    num_ns_steps: int = 5
    fp32_matmul_prec: MatmulPrecision = MatmulPrecision.MEDIUM
    use_syrk: bool = True
    backend: str | None = None  # "reference", "torch", "triton" of Newton-Schulz; None: by device
    muon: MuonRule = field(init=False, repr=False, compare=False)  # orthogonalises

    name = "muown"
    reads_weights: ClassVar[bool] = True
    capturable: ClassVar[bool] = True  # a step reads no device tensor on the host
    numbers: ClassVar[tuple[Number, ...]] = (
        Number("momentum", 0.95),
        Number("betas", (0.9, 0.95)),
        Number("eps", 1e-8),
    )
    state_specs = (
        StateSpec(name=MOMENTUM, whole=True),
        *(StateSpec(name=name, kind=StateKind.REDUCED, dims=(-1,), whole=True) for name in OF_ROWS),
    )

    def __post_init__(self) -> None:
        muon = MuonRule(
            scale_mode=self.scale_mode,
            extra_scale_factor=self.extra_scale_factor,
            coefficient_type=self.coefficient_type,
            custom_coefficients=self.custom_coefficients,
            num_ns_steps=self.num_ns_steps,
            fp32_matmul_prec=self.fp32_matmul_prec,
            use_syrk=self.use_syrk,
            backend=self.backend,
        )
        object.__setattr__(self, "muon", muon)

    def update_(
        self, batches: Sequence[Batch], *, grad_scale: float | Tensor = 1.0, skip: Tensor | None = None
    ) -> None:
        for tasks in access.stacks(batches):
            with_weights = []
            for hyper, work in tasks:
                weights = read_main(work)
                check_states(self, work.state, weights.shape, work.matrix, wide=weights.dtype is torch.float64)
                with_weights.append(Task(hyper, replace(work, state={**work.state, WEIGHTS: weights})))
            inputs = access.scaled_grads(tasks, grad_scale)
            for update, task in zip(self.transform_(with_weights, inputs, skip), tasks):
                self.apply_(task, update, skip)

    def transform_(self, tasks: Sequence[Task], inputs: Tensor, skip: Tensor | None) -> Tensor:
        """The new weights (len(tasks), *shape), given gradients, and the weights in the state `WEIGHTS`."""
        work = tasks[0].work
        if access.matrix_dim(work) is not None:
            raise access.MatrixError(
                f"muown needs whole matrices, but dim {work.matrix.partition_dim} of this one is cut over "
                "tensor-parallel ranks; gather it before the rule, or use Muon with tp_mode 'distributed'"
            )
        rows = [_Rows.of(task.work, grad) for task, grad in zip(tasks, inputs)]
        momenta = []
        for of_task, (hyper, work) in zip(rows, tasks):
            momentum = work.state[MOMENTUM].to(inputs.dtype, copy=True)
            momenta.append(momentum.lerp_(of_task.grad, access.weight_for(momentum, 1.0 - hyper.momentum)))
        steps = self.muon.directions(tasks, torch.stack(momenta), False)
        moved = []
        for of_task, momentum, step, (hyper, work) in zip(rows, momenta, steps, tasks):
            scale_parts_(work, step, self.muon.factors(work))
            direction = of_task.direction - hyper.lr * step
            norm = torch.linalg.vector_norm(direction, dim=-1, keepdim=True).clamp_min(LEAST)
            states = of_task.stepped(hyper)
            moved.append(states[MAGNITUDE] / norm * direction)
            states[DIRECTION_NORM] = norm
            values = [momentum, *(states[name].squeeze(-1) for name in OF_ROWS)]
            kept = [work.state[name] for name in (MOMENTUM, *OF_ROWS)]
            access.assign_(kept, [value.to(state.dtype) for value, state in zip(values, kept)], skip)
        return torch.stack(moved)

    def apply_(self, task: Task, update: Tensor, skip: Tensor | None) -> None:
        """Write the new weights."""
        access.write_main_(task.work, update, skip)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """The rows of a matrix before a step. Numbers of rows are (..., m, 1)."""

    direction: Tensor  # v (..., m, n)
    grad: Tensor  # dv
    magnitude: Tensor  # g
    grad_of_magnitude: Tensor  # dg
    avg: Tensor  # a
    avg_sq: Tensor  # c

    @classmethod
    def of(cls, work: Work, grad: Tensor) -> "_Rows":
        stored = {name: work.state[name].to(grad.dtype).unsqueeze(-1) for name in OF_ROWS}
        weights = work.state[WEIGHTS].to(grad.dtype)
        length = torch.linalg.vector_norm(weights, dim=-1, keepdim=True).clamp_min(LEAST)
        before = stored[MAGNITUDE].abs()
        magnitude = torch.where((length - before).abs() > CHANGED * before, length, before)
        magnitude = magnitude.copysign(stored[MAGNITUDE])
        norm = stored[DIRECTION_NORM]
        norm = torch.where(norm == 0, length, norm)  # in the first step
        unit = weights / magnitude
        of_magnitude = (grad * unit).sum(-1, keepdim=True)
        return cls(
            direction=norm * unit,
            grad=magnitude / norm * (grad - of_magnitude * unit),
            magnitude=magnitude,
            grad_of_magnitude=of_magnitude,
            avg=stored[MAGNITUDE_AVG],
            avg_sq=stored[MAGNITUDE_AVG_SQ],
        )

    def stepped(self, hyper: Hyper) -> dict[str, Tensor]:
        """The states of magnitudes after a step of Adam, and decay."""
        beta1, beta2 = hyper.betas
        avg = self.avg.lerp(self.grad_of_magnitude, access.weight_for(self.avg, 1.0 - beta1))
        avg_sq = self.avg_sq.lerp(self.grad_of_magnitude.square(), access.weight_for(self.avg, 1.0 - beta2))
        mean = avg / (1.0 - beta1**hyper.step)
        root = (avg_sq / (1.0 - beta2**hyper.step)).sqrt()
        magnitude = self.magnitude - hyper.lr * mean / (root + hyper.eps)
        magnitude = magnitude * (1.0 - hyper.lr * hyper.weight_decay)
        return {MAGNITUDE: magnitude, MAGNITUDE_AVG: avg, MAGNITUDE_AVG_SQ: avg_sq}
