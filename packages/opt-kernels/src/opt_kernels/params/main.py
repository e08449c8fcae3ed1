"""Main values: what a rule updates, in the form in which an optimizer keeps them between steps.

They are the parameter itself, an fp32 copy, a bf16 parameter with a remainder, or codes. A remainder of 8 bits takes
one byte an element. With 8-bit moments and gradient release, training takes five bytes a parameter, as with FlashOptim
(arXiv 2602.23349).
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from opt_kernels.backends.elements import in_memory_order
from opt_kernels.codecs import BLOCK, StateCodec, codec_for, rows_of
from opt_kernels.codecs.narrow import join, split_

# Names of what is kept of main values.
MAIN = "main"
REMAINDER = "remainder"
FP16 = codec_for("main_params", torch.float16, signed=True)


class MainFormat(Enum):
    """The form of main values. The first three are options of drop-ins, whose wider parameters are always PARAM."""

    PARAM = "param"  # the parameter itself, in its own dtype
    FP32_COPY = "float32"  # an fp32 copy, which is rounded to the parameter: 4 bytes per element
    REMAINDER = "remainder"  # fp32 whose upper half is the bf16 parameter: 2 bytes for the lower half
    SHORT_REMAINDER = "short remainder"  # the bf16 parameter and 8 more bits: 24 bits in all
    FP16_SCALED = "scaled fp16"  # fp16 codes with a scale for each block; see `CodedMain`


class MainColumns(NamedTuple):
    """The tensors of main values that an update writes, as in `Work`."""

    main: Tensor | None  # updated in place; None: joined from two halves, or decoded
    out: Tensor | None  # receives the rounded value; None: the rule, or `close_`, writes the parameter itself
    remainder: Tensor | None


@dataclass(slots=True, eq=False)
class Main:
    """The main values of `target`: a parameter, its local shard, or a view of a part of it.

    `kept` has the tensors in addition to the target: an fp32 "main" or an int16 or int8 "remainder" of its shape. If it
    has neither, the target is the main value. A drop-in passes `state[param]`, which has the rule's states, too.
    """

    target: Tensor
    kept: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def updated(self) -> "Main":
        """The main values that a rule updates: these, or those in host memory that stand behind them."""
        return self

    @property
    def is_copy(self) -> bool:
        """Whether the parameter is these values rounded, so that a write of other code shows as a difference."""
        return MAIN in self.kept

    @property
    def shape(self) -> torch.Size:
        """Shape of the target."""
        return self.target.shape

    def memory(self) -> AbstractContextManager[None]:
        """Let operations inside use the memory in which a rule updates these values: the device's or the host's."""
        return nullcontext()

    def columns(self) -> MainColumns:
        """Return the tensors that an update writes."""
        if REMAINDER in self.kept:
            return MainColumns(None, self.target, self.kept[REMAINDER])
        if MAIN in self.kept:
            return MainColumns(self.kept[MAIN], self.target, None)
        return MainColumns(self.target, None, None)

    def value(self) -> Tensor:
        """Return the exact main values: their memory, or a new fp32 tensor if they are joined or decoded."""
        if REMAINDER in self.kept:
            return join(self.target.detach(), self.kept[REMAINDER])
        return self.kept.get(MAIN, self.target)

    def present(self) -> Tensor:
        """Return the values that the parameter has now, on the device of the main values."""
        return self.target.detach()

    @torch.no_grad()
    def set_(self, value: Tensor) -> None:
        """Write the main values and the parameter."""
        if REMAINDER in self.kept:
            split_(self.target, self.kept[REMAINDER], value.to(self.target.device, torch.float32))
            return
        if MAIN in self.kept:
            self.kept[MAIN].copy_(value)
        self.target.copy_(value)

    @torch.no_grad()
    def reload_(self) -> None:
        """Set the main values from the parameter, after other code wrote the parameter."""
        if MAIN in self.kept:
            self.kept[MAIN].copy_(self.target)
        if REMAINDER in self.kept:
            self.kept[REMAINDER].zero_()

    def extra(self) -> Mapping[str, Tensor]:
        """Return further tensors of an fp8 parameter that a checkpoint must hold, sharing memory; empty for others."""
        return {}

    def restore_(self, saved: Mapping[str, Tensor]) -> None:
        """Load `extra`, as saved with the main values that were set before. If any was not saved, reset all to zero."""


@dataclass(slots=True, eq=False)
class CodedMain(Main):
    """Main values in scaled fp16: half the memory of an fp32 copy, decoded to fp32 from `open_` to `close_`.

    The codes are fp16, with an fp32 scale (a power of two) for each 128 elements. (Megatron-Core keeps one scale for
    each tensor, max |x| / 32752, so that its values depend on how the tensor is cut over ranks.) The parameter is
    rounded from the values of the codes, not from those that the rule computed, so that a run that loads a checkpoint
    continues with the same parameter.

    An element is off by at most 2**-11 of itself, or by 2**-39 of the largest of its 128, whichever is larger. An
    infinite or NaN element makes all 128 NaN.

    `kept` has "codes" (numel,) fp16 and "scales" (ceil(numel / 128),) fp32.
    """

    opened: Tensor | None = None  # fp32 values, while a rule updates them

    @classmethod
    def of(cls, target: Tensor) -> "CodedMain":
        """Create the main values of `target` from its present values."""
        numel = target.numel()
        codes = torch.zeros(numel, dtype=FP16.dtype, device=target.device)
        scales = torch.zeros(-(-numel // FP16.block), dtype=torch.float32, device=target.device)
        main = cls(target, {"codes": codes, "scales": scales})
        main.reload_()
        return main

    @property
    def is_copy(self) -> bool:
        return True

    def columns(self) -> MainColumns:
        return MainColumns(self.opened, None, None)

    def value(self) -> Tensor:
        return values_of(FP16, self.kept["codes"], self.kept["scales"]).view(self.target.shape)

    def open_(self) -> Tensor:
        """Return the fp32 values, which a rule updates until `close_`."""
        self.opened = self.value()
        return self.opened

    @torch.no_grad()
    def close_(self, *, skip: Tensor | None = None) -> None:
        """Store the updated values. Nothing changes if `skip`, 0-d bool on the device, is set."""
        assert self.opened is not None
        values = self.opened.reshape(-1)
        self.opened = None
        memory = (*self.kept.values(), self.target)
        before = [tensor.clone() for tensor in memory] if skip is not None else ()
        FP16.encode_(self.kept["codes"], self.kept["scales"], values)
        self.target.copy_(self.value())
        for tensor, kept in zip(memory, before):
            tensor.copy_(torch.where(skip, kept, tensor))  # type: ignore[arg-type]  # there are none without a flag

    @torch.no_grad()
    def set_(self, value: Tensor) -> None:
        encode_again_(FP16, self.kept["codes"], self.kept["scales"], value.reshape(-1).float())
        self.target.copy_(self.value())

    @torch.no_grad()
    def reload_(self) -> None:
        values = self.target.detach().reshape(-1).float()
        encode_again_(FP16, self.kept["codes"], self.kept["scales"], values)


@torch.no_grad()
def make_main(format: MainFormat, target: Tensor) -> Main:
    """Create the main values of `target` from its present values. Raises the error of `init_kept`."""
    return CodedMain.of(target) if format is MainFormat.FP16_SCALED else Main(target, init_kept(format, target))


def init_kept(format: MainFormat, target: Tensor) -> dict[str, Tensor]:
    """Return what `Main.kept` has before the first step.

    Raises ValueError for a remainder of a parameter that is not bfloat16.
    """
    if format is MainFormat.PARAM:
        return {}
    if format is MainFormat.FP32_COPY:
        return {MAIN: target.detach().to(torch.float32, copy=True)}
    if target.dtype is not torch.bfloat16:
        raise ValueError(
            f"mains='remainder' with a {target.dtype} parameter: only bfloat16 is the upper half of a float32; "
            "pass mains='float32'"
        )
    dtype = torch.int16 if format is MainFormat.REMAINDER else torch.int8
    return {REMAINDER: torch.zeros_like(target, dtype=dtype, requires_grad=False)}


def values_of(codec: StateCodec, codes: Tensor, scales: Tensor) -> Tensor:
    """Decode `codes`, of dense memory, to a new fp32 tensor of their shape and strides: blocks are runs of memory."""
    values = torch.empty_like(codes, dtype=torch.float32)
    codec.decode_(in_memory_order(values), in_memory_order(codes), scales)
    return values


def encode_again_(codec: StateCodec, codes: Tensor, scales: Tensor, values: Tensor) -> None:
    """Encode `values` to `codes` and `scales`. Values that were decoded from the same blocks are kept exactly.

    The scale of a block follows from its largest value. If the first encoding rounded that value up to a power of two,
    it now requires twice the scale, and the smallest codes would lose a bit. So values are also encoded with the
    largest one reduced by a factor of 1 - 2**-20, which is rounded up again; each block keeps the more exact result.
    If the first encoding rounded the largest value down to a power of two, codes are doubled, and the scale is halved.
    """
    codec.encode_(codes, scales, values)
    is_exact = values_of(codec, codes, scales) == values
    if is_exact.all():
        return
    magnitudes = rows_of(values.abs())
    is_largest = (magnitudes == magnitudes.amax(1, keepdim=True)).view(-1)[: len(values)]
    reduced = torch.where(is_largest, values * (1 - 2.0**-20), values)
    codec.encode_(codes, scales, reduced)
    is_exact_reduced = values_of(codec, codes, scales) == values
    keeps = rows_of(is_exact).sum(1) >= rows_of(is_exact_reduced).sum(1)
    keeps = keeps.repeat_interleave(BLOCK)[: len(values)]
    codec.encode_(codes, scales, torch.where(keeps, values, reduced))
