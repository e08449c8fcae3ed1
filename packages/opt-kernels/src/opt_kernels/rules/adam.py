"""Adam and AdamW."""

from dataclasses import dataclass
from typing import Literal

import torch

from opt_kernels.formulas.adam import ADAM
from opt_kernels.formulas.formula import Formula
from opt_kernels.rules.elementwise import ElementwiseRule

Order = Literal["torch", "te"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam(ElementwiseRule):
    """Adam (Kingma & Ba 2015), with decoupled weight decay (AdamW, Loshchilov & Hutter 2019) by default.

    The formula is in `formulas/adam.py`. Of `Hyper` it reads lr, weight_decay, step, betas and eps. Raises ValueError
    for a dtype, order or backend that does not exist.
    """

    decoupled: bool = True  # False: weight decay is added to the gradient (L2)
    exp_avg_dtype: torch.dtype = torch.float32  # float32, bfloat16, float16, float8_e4m3fn, int8
    exp_avg_sq_dtype: torch.dtype = torch.float32  # float32, bfloat16, float16, float8_e4m3fn, uint8
    order: Order = "torch"  # of operations: torch.optim.AdamW's, or "te", Transformer Engine's
    stochastic_rounding: bool = False  # a bfloat16 main is rounded up or down stochastically, right on average
    backend: str | None = None  # "reference", "torch", "cpp", "triton"; None: by device

    def __post_init__(self) -> None:
        if self.order not in ("torch", "te"):
            raise ValueError(f"order={self.order!r} is unknown; give 'torch' or 'te'")
        ElementwiseRule.__post_init__(self)

    @property
    def formula(self) -> Formula:
        return ADAM.with_constants(decoupled=self.decoupled, te=self.order == "te")

    def dtype_of(self, state: str) -> torch.dtype:
        return self.exp_avg_dtype if state == "exp_avg" else self.exp_avg_sq_dtype
