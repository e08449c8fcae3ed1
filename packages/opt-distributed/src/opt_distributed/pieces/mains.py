"""Main values, which a rule updates: the parameter itself, an fp32 copy, or a bf16 parameter with a remainder.

A remainder of 8 bits takes one byte an element. With 8-bit moments and gradient release, training takes five bytes a
parameter, as with FlashOptim (arXiv 2602.23349).
"""

from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from opt_kernels.codecs import join, split_


class Numbers(Enum):
    """The number format of main values."""

    DIRECT = auto()  # the parameter itself
    FP32_COPY = auto()  # an fp32 copy, which is rounded to the parameter
    REMAINDER = auto()  # the bf16 parameter and the lower 16 bits of the fp32 value
    SHORT_REMAINDER = auto()  # the bf16 parameter and 8 more bits: 24 bits in all
    FP16_SCALED = auto()  # fp16 codes with a scale for each block; see `coded_main`


@dataclass(frozen=True, slots=True)
class Main:
    """The main values of one piece of a parameter. `target` is the piece itself: a view of the parameter's memory."""

    numbers: Numbers
    target: Tensor
    copy: Tensor | None = None  # FP32_COPY: fp32, the target's shape
    remainder: Tensor | None = None  # REMAINDER: int16; SHORT_REMAINDER: int8; the target's shape

    @property
    def main(self) -> Tensor | None:
        """The tensor that a rule updates in place; None if values are joined from two halves."""
        return self.target if self.numbers is Numbers.DIRECT else self.copy

    @property
    def out(self) -> Tensor | None:
        """The tensor that receives the rounded value; None if the rule writes the parameter itself."""
        return None if self.numbers is Numbers.DIRECT else self.target

    @property
    def shape(self) -> torch.Size:
        """Shape of the piece."""
        return self.target.shape

    def kept(self) -> tuple[Tensor, ...]:
        """The tensors kept in addition to the parameter."""
        return tuple(tensor for tensor in (self.copy, self.remainder) if tensor is not None)

    def value(self) -> Tensor:
        """The exact main values: their memory, or a new fp32 tensor if they are joined from two halves."""
        if self.remainder is not None:
            return join(self.target, self.remainder)
        main = self.main
        assert main is not None
        return main

    @torch.no_grad()
    def set_(self, value: Tensor) -> None:
        """Write the main values and the parameter."""
        if self.remainder is not None:
            split_(self.target, self.remainder, value.to(torch.float32))
            return
        if self.copy is not None:
            self.copy.copy_(value)
        self.target.copy_(value)

    @torch.no_grad()
    def reload_(self) -> None:
        """Set the main values from the parameter, after other code wrote the parameter."""
        if self.copy is not None:
            self.copy.copy_(self.target)
        if self.remainder is not None:
            self.remainder.zero_()


@torch.no_grad()
def make_main(numbers: Numbers, target: Tensor) -> Main:
    """Create the main values of `target` from its present values."""
    match numbers:
        case Numbers.DIRECT:
            return Main(numbers, target)
        case Numbers.FP32_COPY:
            return Main(numbers, target, copy=target.detach().to(torch.float32, copy=True))
        case Numbers.REMAINDER | Numbers.SHORT_REMAINDER:
            if target.dtype != torch.bfloat16:
                raise ValueError(f"remainders are for bf16 parameters, and this one is {target.dtype}")
            dtype = torch.int16 if numbers is Numbers.REMAINDER else torch.int8
            return Main(numbers, target, remainder=torch.zeros_like(target, dtype=dtype))
        case Numbers.FP16_SCALED:
            raise ValueError("main values that are decoded are made by CodedMain.of")
