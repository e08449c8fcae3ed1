"""What a rule writes: the parameter itself, an fp32 copy beside it, or the 16 bits that complete it."""

from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from opt_kernels.codecs.remainder import join, split_


class Numbers(Enum):
    """In which numbers the values live that a rule updates."""

    DIRECT = auto()  # in the parameter itself
    FP32_COPY = auto()  # in an fp32 copy; the parameter receives it rounded
    REMAINDER = auto()  # in the bf16 parameter and the 16 bits that make it fp32 again
    FP16_SCALED = auto()  # in fp16 codes with a scale for each block; see `coded_main`


@dataclass(frozen=True, slots=True)
class Main:
    """The main values of one piece of a parameter. `target` is the piece itself: a view of the parameter's memory."""

    numbers: Numbers
    target: Tensor
    copy: Tensor | None = None  # FP32_COPY: fp32, the target's shape
    remainder: Tensor | None = None  # REMAINDER: int16, the target's shape

    @property
    def main(self) -> Tensor | None:
        """What a rule updates in place; None where the value is joined from two halves."""
        return self.target if self.numbers is Numbers.DIRECT else self.copy

    @property
    def out(self) -> Tensor | None:
        """What receives the rounded value; None where the rule writes the parameter itself."""
        return None if self.numbers is Numbers.DIRECT else self.target

    @property
    def shape(self) -> torch.Size:
        """Of the piece."""
        return self.target.shape

    def kept(self) -> tuple[Tensor, ...]:
        """The memory that it takes beside the parameter."""
        return tuple(tensor for tensor in (self.copy, self.remainder) if tensor is not None)

    def value(self) -> Tensor:
        """The main values, exact: the memory itself where it exists, a new fp32 tensor where they must be joined."""
        if self.numbers is Numbers.REMAINDER:
            assert self.remainder is not None
            return join(self.target, self.remainder)
        main = self.main
        assert main is not None
        return main

    @torch.no_grad()
    def set_(self, value: Tensor) -> None:
        """Writes the main values, and the parameter with them."""
        if self.numbers is Numbers.REMAINDER:
            assert self.remainder is not None
            split_(self.target, self.remainder, value.to(torch.float32))
            return
        if self.copy is not None:
            self.copy.copy_(value)
        self.target.copy_(value)

    @torch.no_grad()
    def reload_(self) -> None:
        """Takes the parameter's present value as the main value, after somebody else wrote the parameter."""
        if self.copy is not None:
            self.copy.copy_(self.target)
        if self.remainder is not None:
            self.remainder.zero_()


@torch.no_grad()
def make_main(numbers: Numbers, target: Tensor) -> Main:
    """The main values of `target`, starting from what it holds."""
    match numbers:
        case Numbers.DIRECT:
            return Main(numbers, target)
        case Numbers.FP32_COPY:
            return Main(numbers, target, copy=target.detach().clone(memory_format=torch.contiguous_format).float())
        case Numbers.REMAINDER:
            if target.dtype != torch.bfloat16:
                raise ValueError(f"a remainder completes bf16 parameters; this one is {target.dtype}")
            return Main(numbers, target, remainder=torch.zeros_like(target, dtype=torch.int16))
        case Numbers.FP16_SCALED:
            raise ValueError("scaled fp16 main values are made by coded_main.CodedMain.of")
