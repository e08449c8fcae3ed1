"""Drop-in Muon."""

from collections.abc import Sequence

import torch
from torch import Tensor

from opt_kernels.ops.newton_schulz.coefficients import Coefficients, CoefficientType
from opt_kernels.optim.base import Params
from opt_kernels.optim.matrices import MatrixOptimizer
from opt_kernels.rules.muon import Muon as MuonRule
from opt_kernels.rules.orthogonalization import MatmulPrecision, ScaleMode


class Muon(MatrixOptimizer):
    """Muon (Keller Jordan, 2024) for matrices, and with `scalar_optimizer` Adam or Lion for everything else.

    `momentum` is Muon's; `betas` and `eps` are those of the others. `extra_scale_factor` 0.2 with the spectral scale
    makes updates as large as AdamW's, so that its lr and weight decay serve. Groups choose with `use_matrix_rule` and
    `split_rows`, see `MatrixOptimizer`; the other options are those of `opt_kernels.rules.muon.Muon`, by their names.
    `mains` and `max_norm`: as in `AdamW`. Raises ValueError for an option that is not allowed.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 3e-4,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
        nesterov: bool = False,
        *,
        scalar_optimizer: str | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        scale_mode: str = "spectral",
        extra_scale_factor: float = 1.0,
        coefficient_type: str = "quintic",
        custom_coefficients: Sequence[tuple[float, float, float]] = (),
        num_ns_steps: int = 5,
        fp32_matmul_prec: str = "medium",
        use_syrk: bool = True,
        momentum_buffer_dtype: torch.dtype = torch.float32,
        mains: str = "param",
        max_norm: float | None = None,
        backend: str | None = None,
    ) -> None:
        rule = MuonRule(
            nesterov=nesterov,
            scale_mode=ScaleMode(scale_mode),
            extra_scale_factor=extra_scale_factor,
            coefficient_type=CoefficientType(coefficient_type),
            custom_coefficients=tuple(Coefficients(*step) for step in custom_coefficients),
            num_ns_steps=num_ns_steps,
            fp32_matmul_prec=MatmulPrecision(fp32_matmul_prec),
            use_syrk=use_syrk,
            momentum_buffer_dtype=momentum_buffer_dtype,
            backend=backend,
        )
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "betas": betas, "eps": eps}
        super().__init__(params, rule, defaults, scalar_optimizer=scalar_optimizer, mains=mains, max_norm=max_norm)
