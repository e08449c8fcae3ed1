"""Muon: momentum, orthogonalised."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from opt_kernels.codecs import StateCodec, codec_for, init_state, state_specs
from opt_kernels.dispatch import parse_backend
from opt_kernels.ops.newton_schulz.coefficients import Coefficients, CoefficientType, schedule
from opt_kernels.rules.base import Batch, Needs, StateSpec, Work
from opt_kernels.rules.matrices import (
    Task,
    join,
    matrix_dim,
    read_main,
    read_state,
    scaled_grads,
    split,
    stacks,
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
        for tasks in stacks(batches):
            updates = directions(self, tasks, grad_scale, skip)
            scale_(self, tasks[0].work, updates)
            for update, task in zip(updates, tasks):
                descend_(self, task, update, skip)


def directions(rule: Muon, tasks: Sequence[Task], grad_scale: float | Tensor, skip: Tensor | None) -> Tensor:
    """The orthogonalised momenta of works of one layout, not scaled: a new (len(tasks), *shape). Updates momenta."""
    momenta = scaled_grads(tasks, grad_scale)
    for momentum, task in zip(momenta, tasks):
        accumulate_(rule, task, momentum, skip)
    work = tasks[0].work
    rows = work.matrix.split_rows
    parts = [
        rule.orthogonalization(part, cut_dim=matrix_dim(work), tensor_parallel=work.matrix.tensor_parallel)
        for part in split(momenta, rows)
    ]
    return join(parts, rows).reshape(momenta.shape)


def accumulate_(
    rule: Muon,
    task: Task,
    grad: Tensor,  # (*shape) scaled, in the compute dtype; becomes u, what is to be orthogonalised
    skip: Tensor | None,
) -> None:
    """Updates the momentum buffer, and writes over `grad`."""
    hyper, work = task
    if not rule.decoupled:
        grad.add_(read_main(work) * hyper.weight_decay)
    codec, stored = rule.codecs[MOMENTUM], work.state[MOMENTUM]
    in_place = skip is None and stored.dtype is grad.dtype
    momentum = stored if in_place else read_state(work, MOMENTUM, codec)
    momentum.lerp_(grad, 1.0 - hyper.momentum)
    if not in_place:
        write_state_(work, MOMENTUM, codec, momentum, skip)
    if rule.nesterov:
        grad.lerp_(momentum, hyper.momentum)
    else:
        grad.copy_(momentum)


def scale_(rule: Muon, work: Work, updates: Tensor) -> None:
    """Multiplies `updates` (..., rows, cols), of works like `work`, by s e: each of its split parts by its own s."""
    rows, cols = updates.shape[-2:]
    cut_dim, group = matrix_dim(work), work.matrix.tensor_parallel
    ranks = 1 if group is None else group.size
    split_rows = work.matrix.split_rows or (rows,)
    grouped = updates.view(*updates.shape[:-2], -1, sum(split_rows), cols)
    for part, part_rows in zip(torch.split(grouped, list(split_rows), dim=-2), split_rows):
        whole_rows = part_rows * grouped.shape[-3] * (ranks if cut_dim == -2 else 1)
        whole_cols = cols * (ranks if cut_dim == -1 else 1)
        part.mul_(scale_factor(rule.scale_mode, rows=whole_rows, cols=whole_cols) * rule.extra_scale_factor)


def descend_(rule: Muon, task: Task, update: Tensor, skip: Tensor | None) -> None:
    """p <- p - lr wd p - lr update, where p is not skipped; `update` is overwritten."""
    hyper, work = task
    main = read_main(work) if skip is None else read_main(work).clone()
    if rule.decoupled:
        main.mul_(1.0 - hyper.lr * hyper.weight_decay)
    write_main_(work, main.sub_(update.mul_(hyper.lr)), skip)
