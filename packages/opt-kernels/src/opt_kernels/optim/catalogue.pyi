# The signatures that type checkers and editors see. `tests/test_rules.py` compares them with the classes.
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from opt_kernels.hooks import GivenHooks
from opt_kernels.optim.base import Params
from opt_kernels.optim.formula_optimizer import AveragedOptimizer, FormulaOptimizer, MomentumOptimizer, NAdamOptimizer

__all__ = [
    "SGD",
    "AdEMAMix",
    "Adam",
    "AdamW",
    "AdamWScheduleFree",
    "Adan",
    "LaProp",
    "Lion",
    "MARSAdamW",
    "NAdam",
    "RAdam",
    "Signum",
]

# Options of every drop-in of this module; their defaults are in its signature.
class Common(TypedDict, total=False):
    mains: str
    stochastic_rounding: bool
    max_norm: float | None
    hooks: GivenHooks
    backend: str | None
    foreach: bool | None
    maximize: bool
    capturable: bool
    differentiable: bool
    fused: bool | None

class AdamW(FormulaOptimizer):
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        order: str = "torch",
        *,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        max_exp_avg_sq_dtype: torch.dtype = torch.float32,
        **common: Unpack[Common],
    ) -> None: ...

class Adam(FormulaOptimizer):
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        decoupled_weight_decay: bool = False,
        order: str = "torch",
        *,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        max_exp_avg_sq_dtype: torch.dtype = torch.float32,
        **common: Unpack[Common],
    ) -> None: ...

class SGD(MomentumOptimizer):
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.001,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        momentum_buffer_dtype: torch.dtype = torch.float32,
        **common: Unpack[Common],
    ) -> None: ...

class Lion(FormulaOptimizer):
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.0001,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        exp_avg_dtype: torch.dtype = torch.float32,
        **common: Unpack[Common],
    ) -> None: ...

class Adan(FormulaOptimizer):
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.001,
        betas: tuple[float, float, float] = (0.98, 0.92, 0.99),
        eps: float = 1e-08,
        weight_decay: float = 0.0,
        no_prox: bool = False,
        *,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_diff_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        previous_grad_dtype: torch.dtype = torch.float32,
        **common: Unpack[Common],
    ) -> None: ...

class AdEMAMix(FormulaOptimizer):
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.001,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        eps: float = 1e-08,
        weight_decay: float = 0.0,
        alpha: float = 5.0,
        alpha_steps: float = 0,
        beta3_steps: float = 0,
        *,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_slow_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        **common: Unpack[Common],
    ) -> None: ...

class LaProp(FormulaOptimizer):
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.0004,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-15,
        weight_decay: float = 0.0,
        *,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        **common: Unpack[Common],
    ) -> None: ...

class MARSAdamW(FormulaOptimizer):
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.003,
        betas: tuple[float, float] = (0.95, 0.99),
        eps: float = 1e-08,
        weight_decay: float = 0.0,
        gamma: float = 0.025,
        *,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        previous_grad_dtype: torch.dtype = torch.float32,
        **common: Unpack[Common],
    ) -> None: ...

class NAdam(NAdamOptimizer):
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.002,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0.0,
        momentum_decay: float = 0.004,
        decoupled_weight_decay: bool = False,
        *,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        **common: Unpack[Common],
    ) -> None: ...

class RAdam(FormulaOptimizer):
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        *,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        **common: Unpack[Common],
    ) -> None: ...

class AdamWScheduleFree(AveragedOptimizer):
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.0025,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0.0,
        warmup_steps: float = 0,
        *,
        z_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        **common: Unpack[Common],
    ) -> None: ...

class Signum(FormulaOptimizer):
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.0001,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        momentum_buffer_dtype: torch.dtype = torch.float32,
        **common: Unpack[Common],
    ) -> None: ...
