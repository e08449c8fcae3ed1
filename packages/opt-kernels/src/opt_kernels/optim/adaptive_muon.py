"""Drop-in AdaptiveMuon: AdaMuon and NorMuon."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from opt_kernels.hooks import GivenHooks
from opt_kernels.matrices.newton_schulz.coefficients import CoefficientType
from opt_kernels.matrices.orthogonalization import MatmulPrecision, ScaleMode
from opt_kernels.optim.base import Params
from opt_kernels.optim.matrices import MatrixOptimizer
from opt_kernels.rules.adaptive_muon import AdaptiveMuon as AdaptiveMuonRule
from opt_kernels.rules.adaptive_muon import SecondMoment
from opt_kernels.rules.muon import Muon as MuonRule


class AdaptiveMuon(MatrixOptimizer):
    """Muon with a second moment: "adamuon" of each element, "normuon" of each row of the orthogonalised update.

    `betas[1]` and `eps` are the second moment's; a group of other parameters, which `scalar_optimizer` moves, has its
    own. The other options are `Muon`'s. Raises ValueError for an option that is not allowed.
    """

    def __init__(
        self,
        params: Params | nn.Module,
        lr: float | Tensor = 3e-4,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
        nesterov: bool = False,
        *,
        moment2_method: str = "adamuon",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        scalar_optimizer: str | None = None,
        scalar_options: Mapping[str, Any] | None = None,
        scale_mode: str = "spectral",
        extra_scale_factor: float = 1.0,
        coefficient_type: str = "quintic",
        num_ns_steps: int = 5,
        fp32_matmul_prec: str = "medium",
        momentum_buffer_dtype: torch.dtype = torch.float32,
        mains: str = "param",
        max_norm: float | None = None,
        backend: str | None = None,
        hooks: GivenHooks = (),
    ) -> None:
        muon = MuonRule(
            nesterov=nesterov,
            scale_mode=ScaleMode(scale_mode),
            extra_scale_factor=extra_scale_factor,
            coefficient_type=CoefficientType(coefficient_type),
            num_ns_steps=num_ns_steps,
            fp32_matmul_prec=MatmulPrecision(fp32_matmul_prec),
            momentum_buffer_dtype=momentum_buffer_dtype,
            backend=backend,
        )
        rule = AdaptiveMuonRule(muon=muon, second_moment=SecondMoment(moment2_method))
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "betas": betas, "eps": eps}
        super().__init__(
            params,
            rule,
            defaults,
            scalar_optimizer=scalar_optimizer,
            scalar_options=scalar_options,
            mains=mains,
            max_norm=max_norm,
            backend=backend,
            hooks=hooks,
        )
