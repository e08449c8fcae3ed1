"""Drop-in Lion."""

import torch
from torch import Tensor

from opt_kernels.optim.base import Params, RuleOptimizer
from opt_kernels.rules.lion import Lion as LionRule


class Lion(RuleOptimizer):
    """Lion (Chen et al. 2023, arXiv 2302.06675); it moves every element by lr: give a tenth to a third of AdamW's.

    `mains`, `exp_avg_dtype`, `max_norm`, `foreach`, `fused`: as in `AdamW`. Raises ValueError for an option that is not
    allowed.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        mains: str = "param",
        exp_avg_dtype: torch.dtype = torch.float32,
        max_norm: float | None = None,
        backend: str | None = None,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        rule = LionRule(exp_avg_dtype=exp_avg_dtype, backend=backend)
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        flags = {
            "foreach": foreach,
            "maximize": maximize,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
        }
        super().__init__(params, rule, defaults, mains=mains, max_norm=max_norm, flags=flags)
