"""Main values in 24 bits: a bf16 parameter and 8 more bits, decoded to fp32 during an update.

One byte an element where a 16-bit remainder takes two. With 8-bit moments and gradient release, training takes five
bytes a parameter, as with FlashOptim (arXiv 2602.23349).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from opt_distributed.step.coded_main import CodedMain
from opt_distributed.step.mains import Numbers
from opt_kernels.codecs.short_remainder import join_short, split_short_


@dataclass(slots=True)
class ShortMain:
    """Main values of one piece of a bf16 parameter, with the interface of `Main`.

    A rule updates fp32 values, `main`, which exist between `open_` and `close_`.
    """

    numbers: ClassVar[Numbers] = Numbers.SHORT_REMAINDER
    copy: ClassVar[None] = None
    remainder: ClassVar[None] = None  # kernels do not know `bits`
    out: ClassVar[None] = None  # `close_` writes the parameter

    target: Tensor
    bits: Tensor  # int8, the target's shape
    main: Tensor | None = None  # fp32, the target's shape

    @classmethod
    def of(cls, target: Tensor) -> "ShortMain":
        """Create the main values of `target` from its present values."""
        return cls(target, torch.zeros(target.shape, dtype=torch.int8, device=target.device))

    @property
    def shape(self) -> torch.Size:
        """Of the piece."""
        return self.target.shape

    def kept(self) -> tuple[Tensor, ...]:
        """The tensors kept in addition to the parameter."""
        return (self.bits,)

    def value(self) -> Tensor:
        """Decode the main values to a new fp32 tensor, contiguous in the target's shape."""
        return join_short(self.target.detach(), self.bits).contiguous()

    def open_(self) -> Tensor:
        """Return the decoded values, which a rule updates until `close_`."""
        self.main = self.value()
        return self.main

    @torch.no_grad()
    def close_(self, *, skip: Tensor | None = None) -> None:
        """Encode the updated values and write the parameter. Neither changes if `skip`, 0-d on the device, is set."""
        assert self.main is not None
        moved, self.main = self.main, None
        split_short_(self.target, self.bits, moved if skip is None else torch.where(skip, self.value(), moved))

    @torch.no_grad()
    def set_(self, value: Tensor) -> None:
        """Write the main values and the parameter."""
        split_short_(self.target, self.bits, value.to(torch.float32))

    @torch.no_grad()
    def reload_(self) -> None:
        """Set the main values from the parameter, after other code wrote the parameter."""
        self.bits.zero_()


DecodedMain = CodedMain | ShortMain
"""Main values that a rule updates in temporary fp32 memory."""
