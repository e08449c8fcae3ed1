"""Muon: orthogonalised momentum."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from opt_kernels.backends.dispatch import check_backend, tensors_of, version
from opt_kernels.backends.elements import compute_dtype, read_main
from opt_kernels.codecs import Codecs, codec_for, init_state, state_specs
from opt_kernels.matrices.access import (
    cut_of_parts,
    join,
    read_state,
    split,
    weight_for,
    whole_size,
    write_main_,
    write_state_,
)
from opt_kernels.matrices.coefficients import Coefficients, CoefficientType
from opt_kernels.matrices.muon import (
    MOMENTUM,
    Decay,
    Inputs,
    PostNorm,
    PreNorm,
    ScaleMode,
    decay_of,
    scale_factor,
    scale_parts_,
)
from opt_kernels.matrices.orthogonalization import EPS, MatmulPrecision, Orthogonalization, TpMode
from opt_kernels.rules.base import Needs
from opt_kernels.works import Batch, Scalar, Skip, States, StateSpec, Task, Work


# Without slots: a rule that also inherits from another one with slots could not be built.
@dataclass(frozen=True, kw_only=True)
class NewtonSchulzRule:
    """The options of rules that orthogonalise matrices, with their scale s e: s is the factor of `scale_mode` for the
    size of a matrix, and e `extra_scale_factor`. All products except those of Newton-Schulz are float32."""

    scale_mode: ScaleMode = ScaleMode.SPECTRAL
    extra_scale_factor: float = 1.0
    coefficient_type: CoefficientType = CoefficientType.QUINTIC
    custom_coefficients: tuple[Coefficients, ...] = ()  # with CoefficientType.CUSTOM, repeated in a cycle
    num_ns_steps: int = 5
    fp32_matmul_prec: MatmulPrecision = MatmulPrecision.MEDIUM
    use_syrk: bool = True  # compute half of each symmetric product where that is faster
    backend: str | None = None  # "reference", "torch", "triton"; None: by device
    orthogonalization: Orthogonalization = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "orthogonalization", Orthogonalization.of(self))

    def scale(self, *, rows: int, cols: int) -> float:
        """Return s e of a matrix of this size."""
        return scale_factor(self.scale_mode, rows=rows, cols=cols) * self.extra_scale_factor

    def scales(self, work: Work) -> tuple[float, ...]:
        """Return s e of each split part of the work, with s for the size of the whole part."""
        rows, cols = whole_size(work)
        sizes = work.matrix.split_rows or (rows,)
        groups = 1 if work.matrix.by_group else rows // sum(sizes)
        return tuple(self.scale(rows=size * groups, cols=cols) for size in sizes)

    def directions(self, tasks: Sequence[Task], inputs: Tensor, normalised: bool) -> Tensor:
        """Return O (len(tasks), *shape) without its scale, for works of one layout. `normalised`: as in `Inputs`."""
        work = tasks[0].work
        orthogonalise = partial(self.orthogonalization, cut=cut_of_parts(work), normalised=normalised)
        parts = split(inputs, work.matrix)
        by_shape: dict[torch.Size, list[int]] = {}
        for index, part in enumerate(parts):
            by_shape.setdefault(part.shape, []).append(index)
        for indices in by_shape.values():
            stacked = torch.cat([parts[i] for i in indices]) if len(indices) > 1 else parts[indices[0]]
            directions = orthogonalise(stacked).chunk(len(indices))
            for index, direction in zip(indices, directions):
                parts[index] = direction
        return join(parts, work.matrix, inputs.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonRule(NewtonSchulzRule):
    """Muon (Keller Jordan, 2024; scaled as in Moonlight, arXiv 2502.16982). Of `Hyper`: lr, weight_decay, momentum mu.

        m <- m + (1 - mu)(g - m)
        u <- g + mu (m - g)   with nesterov, else m
        O <- Newton-Schulz(u), separately for q, k and v if the work declares how its rows are split
        with pre_norm="rows", of u_i / |u_i| for the rows i of u (MuonEq, arXiv 2603.28254)
        O <- O sqrt(min(m, n)) / |O|  with post_norm="frobenius"; "rows" and "cols" divide each of them by its norm
                                      (Muon+, arXiv 2602.21545)
        O <- <O, u> O                 with nuclear_scale (PolarGrad, arXiv 2505.21799): the step grows with u
        p <- p - lr wd p - lr s e O    (independent decay: p - wd p - lr s e O; L2: g <- g + wd p first, and no wd here)

    where s is the scale for the size of the whole matrix, also if the work is a part of it, and e the extra factor.
    Heads (`MatrixSpec.by_group`) are separate matrices with their own scales. Raises ValueError for options that
    conflict. `update_` raises MatrixError for a work that is not a matrix.
    """

    nesterov: bool = False
    weight_decay_method: Decay = Decay.DECOUPLED
    eps: float = EPS  # lower bound of the norm that a momentum is divided by
    tp_mode: TpMode = TpMode.BLOCKWISE
    pre_norm: PreNorm = PreNorm.NONE
    post_norm: PostNorm = PostNorm.NONE
    nuclear_scale: bool = False
    momentum_buffer_dtype: torch.dtype = torch.float32  # float32, bfloat16, float16, float8_e4m3fn, float8_e5m2, int8
    codecs: Codecs = field(init=False, repr=False, compare=False)
    """The codecs of the states, by name."""
    capturable = True  # a step reads no device tensor on the host
    name = "muon"
    needs = Needs.MATRICES

    def __post_init__(self) -> None:
        check_backend(self.backend, "muon")
        codec = codec_for(MOMENTUM, self.momentum_buffer_dtype, signed=True)
        object.__setattr__(self, "codecs", {MOMENTUM: codec})
        if self.nuclear_scale and (self.pre_norm is not PreNorm.NONE or self.post_norm is not PostNorm.NONE):
            raise ValueError(
                f"nuclear_scale=True with pre_norm={self.pre_norm.value!r}, post_norm={self.post_norm.value!r}: the "
                "nuclear norm is that of an update which nothing else normalises; leave the norms at 'none'"
            )
        NewtonSchulzRule.__post_init__(self)  # super() fails: `slots` makes another class than the one it names

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        return state_specs(self.codecs)

    def init_state(self, main: Tensor) -> States:
        return init_state(self.codecs, main)

    def update_(self, batches: Sequence[Batch], *, grad_scale: Scalar = 1.0, skip: Skip = None) -> None:
        in_phases_ = version("muon", "in_phases_", backend=self.backend, tensors=tensors_of(batches))
        in_phases_(batches, self, grad_scale=grad_scale, skip=skip)

    def prepare_(self, task: Task, grad: Tensor, skip: Skip) -> None:
        """Update the momentum, and turn `grad` into u."""
        hyper, work = task
        if self.weight_decay_method is Decay.L2:
            grad.add_(decay_of(read_main(work), hyper.weight_decay))
        codec = self.codecs[MOMENTUM]
        stored = work.state[MOMENTUM]
        in_place = skip is None and stored.dtype is grad.dtype
        momentum = stored if in_place else read_state(work, MOMENTUM, codec)
        momentum.lerp_(grad, weight_for(momentum, 1.0 - hyper.momentum))
        if not in_place:
            write_state_(work, MOMENTUM, codec, momentum, skip)
        if self.nesterov:
            grad.lerp_(momentum, weight_for(grad, hyper.momentum))
        else:
            grad.copy_(momentum)

    def inputs(self, work: Work) -> Inputs:
        """Return the format in which `transform_` prefers the matrices of a work: unchanged, if it is overridden."""
        if type(self).transform_ is not MuonRule.transform_:
            return Inputs(compute_dtype(work), False)
        return self.orthogonalization.inputs(compute_dtype(work), work.grad.device, cut_of_parts(work))

    def transform_(self, tasks: Sequence[Task], inputs: Tensor, skip: Skip, *, normalised: bool = False) -> Tensor:
        """Return O without its scale. `normalised`: as in `Inputs`."""
        return self.directions(tasks, inputs, normalised)

    def adapt_(self, task: Task, update: Tensor, skip: Skip) -> None:
        """Do nothing: O is not changed before it is scaled."""

    def update_dtype(self, dtype: torch.dtype, device: torch.device) -> torch.dtype:
        """Return the dtype of Newton-Schulz, in which `transform_` returns O; `dtype` if O is scaled afterwards."""
        is_scaled = self.nuclear_scale or self.post_norm is not PostNorm.NONE
        return dtype if is_scaled else self.orthogonalization.dtype_of_products(dtype, device)

    def apply_(self, task: Task, update: Tensor, skip: Skip) -> None:
        """Scale the direction, and update the weights along it."""
        hyper, work = task
        scale_parts_(work, update, self.scales(work))
        main = read_main(work, copy=skip is not None)
        if self.weight_decay_method is not Decay.L2:
            rate = hyper.lr if self.weight_decay_method is Decay.DECOUPLED else 1.0
            main.mul_(1.0 - rate * hyper.weight_decay)
        write_main_(work, main.sub_(update.mul_(hyper.lr)), skip)
