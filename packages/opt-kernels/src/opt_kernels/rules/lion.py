"""Lion."""

from dataclasses import dataclass

import torch

from opt_kernels.formulas.formula import Formula
from opt_kernels.formulas.lion import LION
from opt_kernels.rules.elementwise import ElementwiseRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Lion(ElementwiseRule):
    """Lion (Chen et al. 2023): every element moves by the learning rate, up or down; one state.

    The formula is in `formulas/lion.py`. Of `Hyper` it reads lr, weight_decay and betas. Raises ValueError for a dtype
    or backend that does not exist.
    """

    exp_avg_dtype: torch.dtype = torch.float32  # float32, bfloat16, float16, float8_e4m3fn, int8
    backend: str | None = None  # "reference", "torch", "cpp", "triton"; None: by device

    @property
    def formula(self) -> Formula:
        return LION

    def dtype_of(self, state: str) -> torch.dtype:
        return self.exp_avg_dtype
