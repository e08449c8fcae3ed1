"""Drop-in Adam and AdamW."""

import torch
from torch import Tensor

from opt_kernels.optim.base import Params, RuleOptimizer
from opt_kernels.rules.adam import Adam as AdamRule
from opt_kernels.rules.adam import Order


class Adam(RuleOptimizer):
    """Adam (Kingma & Ba 2015) with torch.optim.Adam's arguments and state_dict; weight decay is added to the gradient.

    `mains`, `exp_avg_dtype` and `exp_avg_sq_dtype` choose the dtypes of parameters and moments, `max_norm` clips within
    the update. See `AdamW` for all of them. Raises ValueError for an option that is not allowed.
    """

    fixed = ("decoupled_weight_decay",)

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        decoupled_weight_decay: bool = False,
        mains: str = "param",
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        order: Order = "torch",
        stochastic_rounding: bool = False,
        max_norm: float | None = None,
        backend: str | None = None,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        rule = AdamRule(
            decoupled=decoupled_weight_decay,
            exp_avg_dtype=exp_avg_dtype,
            exp_avg_sq_dtype=exp_avg_sq_dtype,
            order=order,
            stochastic_rounding=stochastic_rounding,
            backend=backend,
        )
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        flags = {
            "amsgrad": amsgrad,
            "foreach": foreach,
            "maximize": maximize,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
        }
        super().__init__(params, rule, defaults, mains=mains, max_norm=max_norm, flags=flags)


class AdamW(RuleOptimizer):
    """AdamW (Loshchilov & Hutter 2019) with torch.optim.AdamW's arguments and state_dict.

    `mains`: "param" updates the parameters themselves; "float32" keeps a float32 copy of each narrower one;
    "remainder" keeps the 16 bits that a bfloat16 parameter lacks of float32. `exp_avg_dtype`, `exp_avg_sq_dtype`:
    float32, bfloat16, float16, float8_e4m3fn, or 8-bit codes: int8 for the first, uint8 for the second.
    `stochastic_rounding`: bfloat16 parameters that have no other main are rounded stochastically. `max_norm`: clip the
    gradients' total norm within the update. `order`, `backend`: see `opt_kernels.rules.adam`. The moments of a float64
    parameter are float64 where those of others are float32.

    `foreach` and `fused` change nothing: every step is fused. Raises ValueError for `amsgrad`, `maximize`, `capturable`
    and `differentiable`, which are not offered, and for an option that is not allowed.
    """

    fixed = ("decoupled_weight_decay",)

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        mains: str = "param",
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        order: Order = "torch",
        stochastic_rounding: bool = False,
        max_norm: float | None = None,
        backend: str | None = None,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        rule = AdamRule(
            exp_avg_dtype=exp_avg_dtype,
            exp_avg_sq_dtype=exp_avg_sq_dtype,
            order=order,
            stochastic_rounding=stochastic_rounding,
            backend=backend,
        )
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": True,
        }
        flags = {
            "amsgrad": amsgrad,
            "foreach": foreach,
            "maximize": maximize,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
        }
        super().__init__(params, rule, defaults, mains=mains, max_norm=max_norm, flags=flags)
