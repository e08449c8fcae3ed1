"""SGD with momentum."""

from dataclasses import dataclass

import torch

from opt_kernels.formulas.formula import Formula
from opt_kernels.formulas.sgd import PLAIN_SGD
from opt_kernels.formulas.sgd import SGD as FORMULA
from opt_kernels.rules.elementwise import ElementwiseRule
from opt_kernels.works import Hyper


@dataclass(frozen=True, slots=True, kw_only=True)
class SGD(ElementwiseRule):
    """Gradient descent, with momentum by default (Sutskever et al. 2013, in the form of torch.optim.SGD).

    The formula is in `formulas/sgd.py`. Of `Hyper` it reads lr, weight_decay, step and momentum. Raises
    ValueError where nesterov goes with dampening or without a buffer, and for a dtype or backend that does not exist.
    """

    momentum_buffer: bool = True  # False: plain descent, no state, and momentum is not read
    momentum_buffer_dtype: torch.dtype = torch.float32  # float32, bfloat16, float16, float8_e4m3fn, int8
    nesterov: bool = False
    dampening: float = 0.0
    backend: str | None = None  # "reference", "torch", "cpp", "triton"; None: by device

    def __post_init__(self) -> None:
        ElementwiseRule.__post_init__(self)
        if self.nesterov and (self.dampening or not self.momentum_buffer):
            raise ValueError(
                f"nesterov=True with dampening={self.dampening}, momentum_buffer={self.momentum_buffer}: "
                "Nesterov momentum needs a buffer and no dampening; give dampening=0.0 and momentum_buffer=True"
            )

    @property
    def name(self) -> str:
        return "sgd"

    @property
    def formula(self) -> Formula:
        if not self.momentum_buffer:
            return PLAIN_SGD
        return FORMULA.with_constants(nesterov=self.nesterov, dampening=self.dampening)

    def formula_at(self, hyper: Hyper) -> Formula:
        """At momentum zero the buffer rests: it must not even be rounded again."""
        return self.formula if hyper.momentum != 0 else PLAIN_SGD

    def dtype_of(self, state: str) -> torch.dtype:
        return self.momentum_buffer_dtype
