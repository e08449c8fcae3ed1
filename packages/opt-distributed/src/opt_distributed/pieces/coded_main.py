"""Main values in scaled fp16: half the memory of an fp32 copy, decoded to fp32 during an update.

The codes are fp16, with an fp32 scale (a power of two) for each 128 elements. (Megatron-Core keeps one scale for each
tensor, max |x| / 32752, so that its values depend on how the tensor is cut over ranks.) The parameter is rounded from
the values of the codes, not from those that the rule computed, so that a run that loads a checkpoint continues with
the same parameter.

An element is off by at most 2**-11 of itself, or by 2**-39 of the largest of its 128, whichever is larger. An infinite
or NaN element makes all 128 NaN.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from opt_distributed.pieces.codes import encode_again_, values_of
from opt_distributed.pieces.mains import Numbers
from opt_kernels.codecs import codec_for

FP16 = codec_for("main_params", torch.float16, signed=True)


@dataclass(slots=True)
class CodedMain:
    """Main values of one piece of a parameter, with the interface of `Main`.

    A rule updates fp32 values, `main`, which exist between `open_` and `close_`.
    """

    numbers: ClassVar[Numbers] = Numbers.FP16_SCALED
    copy: ClassVar[None] = None
    remainder: ClassVar[None] = None
    out: ClassVar[None] = None  # `close_` writes the parameter

    target: Tensor
    codes: Tensor  # (target.numel(),) fp16
    scales: Tensor  # (ceil(target.numel() / 128),) fp32
    main: Tensor | None = None  # fp32, the target's shape

    @classmethod
    def of(cls, target: Tensor) -> "CodedMain":
        """Create the main values of `target` from its present values."""
        numel, device = target.numel(), target.device
        codes = torch.zeros(numel, dtype=FP16.dtype, device=device)
        made = cls(target, codes, torch.zeros(-(-numel // FP16.block), dtype=torch.float32, device=device))
        made.reload_()
        return made

    @property
    def shape(self) -> torch.Size:
        """Shape of the piece."""
        return self.target.shape

    def kept(self) -> tuple[Tensor, ...]:
        """The tensors kept in addition to the parameter."""
        return self.codes, self.scales

    def value(self) -> Tensor:
        """Decode the main values to a new fp32 tensor, in the target's shape."""
        return values_of(FP16, self.codes, self.scales).view(self.target.shape)

    def open_(self) -> Tensor:
        """Return the decoded values, which a rule updates until `close_`."""
        self.main = self.value()
        return self.main

    @torch.no_grad()
    def close_(self, *, skip: Tensor | None = None) -> None:
        """Encode the updated values and write the parameter. Neither changes if `skip`, 0-d on the device, is set."""
        assert self.main is not None
        moved, self.main = self.main.reshape(-1), None
        if skip is None:
            FP16.encode_(self.codes, self.scales, moved)
            self.target.copy_(self.value())
            return
        kept = self.codes.clone(), self.scales.clone(), self.target.clone()
        FP16.encode_(self.codes, self.scales, moved)
        self.target.copy_(self.value())
        for memory, before in zip((self.codes, self.scales, self.target), kept, strict=True):
            memory.copy_(torch.where(skip, before, memory))

    @torch.no_grad()
    def set_(self, value: Tensor) -> None:
        """Write the main values and the parameter."""
        encode_again_(FP16, self.codes, self.scales, value.reshape(-1).float())
        self.target.copy_(self.value())

    @torch.no_grad()
    def reload_(self) -> None:
        """Set the main values from the parameter, after other code wrote the parameter."""
        encode_again_(FP16, self.codes, self.scales, self.target.detach().reshape(-1).float())
