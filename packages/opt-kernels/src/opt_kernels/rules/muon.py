"""Muon: momentum, orthogonalised."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from opt_kernels.codecs import StateCodec, codec_for, init_state, state_specs
from opt_kernels.dispatch import parse_backend
from opt_kernels.ops.newton_schulz.coefficients import Coefficients, CoefficientType, schedule
from opt_kernels.rules.base import Batch, Needs, StateSpec, Task, Work
from opt_kernels.rules.matrices import (
    join,
    matrix_dim,
    read_main,
    read_state,
    split,
    update_in_phases_,
    whole_size,
    write_main_,
    write_state_,
)
from opt_kernels.rules.orthogonalization import MatmulPrecision, Orthogonalization, ScaleMode, TpMode, scale_factor

MOMENTUM = "momentum_buffer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Muon:
    """Muon (Keller Jordan, 2024; scaled as in Moonlight, arXiv 2502.16982). Of `Hyper`: lr, weight_decay, momentum mu.

        m <- m + (1 - mu)(g - m)
        u <- g + mu (m - g)   with nesterov, else m
        O <- Newton-Schulz(u), of each of q, k and v by itself where the work says how its rows are split
        p <- p - lr wd p - lr s e O

    where s is the scale for the size of the whole matrix, whatever part of it is here, and e the extra factor. With
    `decoupled=False`, g is g + wd p before all this and p is not decayed. Raises ValueError for options that do not
    go together; `update_` raises MatrixError for a work that is no matrix.
    """

    nesterov: bool = False
    decoupled: bool = True
    scale_mode: ScaleMode = ScaleMode.SPECTRAL
    extra_scale_factor: float = 1.0
    coefficient_type: CoefficientType = CoefficientType.QUINTIC
    custom_coefficients: tuple[Coefficients, ...] = ()  # with CoefficientType.CUSTOM, repeated in a cycle
    num_ns_steps: int = 5
    fp32_matmul_prec: MatmulPrecision = MatmulPrecision.MEDIUM
    use_syrk: bool = True  # compute half of a symmetric product where that is faster
    tp_mode: TpMode = TpMode.BLOCKWISE
    momentum_buffer_dtype: torch.dtype = torch.float32  # float32, bfloat16, float16, float8_e4m3fn, int8
    backend: str | None = None  # "reference", "torch", "triton"; None: by device

    def __post_init__(self) -> None:
        parse_backend(self.backend)
        codec_for(MOMENTUM, self.momentum_buffer_dtype, signed=True)
        schedule(self.coefficient_type, num_steps=self.num_ns_steps, custom=self.custom_coefficients)

    @property
    def name(self) -> str:
        return "muon"

    @property
    def needs(self) -> Needs:
        return Needs.MATRICES

    @property
    def codecs(self) -> dict[str, StateCodec]:
        """How each state is stored."""
        return {MOMENTUM: codec_for(MOMENTUM, self.momentum_buffer_dtype, signed=True)}

    @property
    def orthogonalization(self) -> Orthogonalization:
        steps = schedule(self.coefficient_type, num_steps=self.num_ns_steps, custom=self.custom_coefficients)
        return Orthogonalization(
            schedule=steps,
            precision=self.fp32_matmul_prec,
            use_syrk=self.use_syrk,
            tp_mode=self.tp_mode,
            backend=self.backend,
        )

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        return state_specs(self.codecs)

    def init_state(self, main: Tensor) -> dict[str, Tensor]:
        return init_state(self.codecs, main)

    def update_(
        self, batches: Sequence[Batch], *, grad_scale: float | Tensor = 1.0, skip: Tensor | None = None
    ) -> None:
        update_in_phases_(self, batches, grad_scale=grad_scale, skip=skip)

    def prepare_(self, task: Task, grad: Tensor, skip: Tensor | None) -> None:
        """The momentum, and from it u."""
        hyper, work = task
        if not self.decoupled:
            grad.add_(read_main(work) * hyper.weight_decay)
        codec, stored = self.codecs[MOMENTUM], work.state[MOMENTUM]
        in_place = skip is None and stored.dtype is grad.dtype
        momentum = stored if in_place else read_state(work, MOMENTUM, codec)
        momentum.lerp_(grad, 1.0 - hyper.momentum)
        if not in_place:
            write_state_(work, MOMENTUM, codec, momentum, skip)
        if self.nesterov:
            grad.lerp_(momentum, hyper.momentum)
        else:
            grad.copy_(momentum)

    def transform_(self, tasks: Sequence[Task], inputs: Tensor, skip: Tensor | None) -> Tensor:
        """O, not scaled."""
        work = tasks[0].work
        rows = work.matrix.split_rows
        parts = [
            self.orthogonalization(part, cut_dim=matrix_dim(work), tensor_parallel=work.matrix.tensor_parallel)
            for part in split(inputs, rows)
        ]
        return join(parts, rows).reshape(inputs.shape)

    def apply_(self, task: Task, update: Tensor, skip: Tensor | None) -> None:
        """Scales the direction, and goes along it."""
        scale_(self, task.work, update)
        descend_(self, task, update, skip)


def scale_(rule: Muon, work: Work, update: Tensor) -> None:
    """Multiplies `update` (*shape) by s e: the rows of each of its split parts by its own s, that of the whole part."""
    rows, cols = whole_size(work)
    sizes = work.matrix.split_rows or (rows,)
    factors = [
        scale_factor(rule.scale_mode, rows=size * (rows // sum(sizes)), cols=cols) * rule.extra_scale_factor
        for size in sizes
    ]
    if len(sizes) == 1:
        update.mul_(factors[0])
        return
    first = 0 if work.matrix.part is None else work.matrix.part.first_row
    of_group = torch.arange(first, first + update.shape[-2], device=update.device).remainder_(sum(sizes))
    scales = torch.full_like(of_group, factors[-1], dtype=update.dtype)
    for factor, end in reversed(list(zip(factors[:-1], accumulate(sizes)))):
        scales.masked_fill_(of_group < end, factor)
    update.mul_(scales.unsqueeze(-1))


def descend_(rule: Muon, task: Task, update: Tensor, skip: Tensor | None) -> None:
    """p <- p - lr wd p - lr update, where p is not skipped; `update` is overwritten."""
    hyper, work = task
    main = read_main(work) if skip is None else read_main(work).clone()
    if rule.decoupled:
        main.mul_(1.0 - hyper.lr * hyper.weight_decay)
    write_main_(work, main.sub_(update.mul_(hyper.lr)), skip)
