"""Codecs: in which numbers a state tensor is kept between steps, and how it is read and written.

Narrow codecs scale by block, not by tensor: a scale can be computed while its block is in registers, so that one pass
suffices, and one outlier spoils 128 neighbours instead of a million. What a codec stores is not what a checkpoint
holds: that is float32, decoded.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from opt_kernels.works import StateKind, StateSpec

BLOCK = 128  # elements that share a scale: 1/32 byte of scale per element
TINY = torch.finfo(torch.float32).tiny  # smallest normal: below it a scale could not be divided by


class CodecError(ValueError):
    """A state was asked for in a dtype for which there is no codec."""


class StateCodec(Protocol):
    """How one state is stored: codes, one per element, and for some codecs a scale for each block of elements.

    Both methods work on flat runs that begin at a multiple of `block`. Zeros are stored as zeros by every codec.
    """

    @property
    def dtype(self) -> torch.dtype:
        """Of the codes."""
        ...

    @property
    def block(self) -> int:
        """Elements that share one float32 scale; 0 where there are no scales."""
        ...

    def decode_(self, values: Tensor, codes: Tensor, scales: Tensor | None) -> None:
        """Writes `values` (n,), float32 or float64, from `codes` (n,) and `scales` (ceil(n / block),)."""
        ...

    def encode_(self, codes: Tensor, scales: Tensor | None, values: Tensor) -> None:
        """Writes `codes` and `scales` from `values`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """The values themselves, rounded to nearest even in `dtype`; no scales."""

    dtype: torch.dtype = torch.float32

    @property
    def block(self) -> int:
        return 0

    def decode_(self, values: Tensor, codes: Tensor, scales: Tensor | None) -> None:
        values.copy_(codes)

    def encode_(self, codes: Tensor, scales: Tensor | None, values: Tensor) -> None:
        codes.copy_(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """A narrow float with a scale per block, a power of two, so that scaling itself rounds nothing.

    scale = 2^(e - exponent) where 2^(e-1) <= max |x| < 2^e, and at least 2^-126; code = x / scale, to nearest even.
    A state that is never negative is stored as its root, which halves the range of exponents, and no positive value is
    stored as zero: a second moment that vanished would leave eps alone under a first moment that did not. A block with
    a value that is not finite decodes as NaN.
    """

    dtype: torch.dtype
    exponent: int  # codes are below 2^exponent before they are rounded
    smallest: float  # the smallest positive code
    signed: bool
    block: int = BLOCK

    def decode_(self, values: Tensor, codes: Tensor, scales: Tensor | None) -> None:
        _scaled_(values.copy_(codes), scales, self.block)
        if not self.signed:
            values.square_()

    def encode_(self, codes: Tensor, scales: Tensor | None, values: Tensor) -> None:
        x = values if self.signed else _root(values)
        y = _normalised(x, scales, self.block, exponent=self.exponent)
        if not self.signed:
            y = torch.where(x > 0, y.clamp(min=self.smallest), y)
        codes.copy_(y)


@dataclass(frozen=True, slots=True, kw_only=True)
class Companded:
    """Signed 8-bit codes with a scale per block, denser near zero (FlashOptim, arXiv 2602.23349, section 3).

    scale = max |x|; n = x / scale; code = round(127 * 2n / (1 + |n|)). Back: y = code / 127; x = scale * y / (2 - |y|).
    A block with a value that is not finite decodes as NaN.
    """

    block: int = BLOCK

    @property
    def dtype(self) -> torch.dtype:
        return torch.int8

    def decode_(self, values: Tensor, codes: Tensor, scales: Tensor | None) -> None:
        y = values.copy_(codes).div_(127)
        _scaled_(y.div_(2 - y.abs()), scales, self.block)

    def encode_(self, codes: Tensor, scales: Tensor | None, values: Tensor) -> None:
        n = _normalised(values, scales, self.block)
        codes.copy_(_rounded(n.div_(n.abs().add_(1)).mul_(2 * 127)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """Unsigned 8-bit codes of the root of a state that is never negative, with a scale per block.

    scale = max sqrt(x); code = round(255 * sqrt(x) / scale), at least 1 where x > 0: a second moment that vanished
    would leave eps alone under a first moment that did not. Back: x = (code / 255 * scale)^2. A block with a value that
    is not finite decodes as NaN.
    """

    block: int = BLOCK

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    def decode_(self, values: Tensor, codes: Tensor, scales: Tensor | None) -> None:
        _scaled_(values.copy_(codes).div_(255), scales, self.block).square_()

    def encode_(self, codes: Tensor, scales: Tensor | None, values: Tensor) -> None:
        root = _root(values)
        y = _rounded(_normalised(root, scales, self.block).mul_(255))
        codes.copy_(torch.where(root > 0, y.clamp(min=1), y))


def codec_for(name: str, dtype: torch.dtype, *, signed: bool) -> StateCodec:
    """The codec that keeps the state `name` in `dtype`; `signed` unless the state is never negative.

    Raises CodecError for a dtype that has none.
    """
    match dtype:
        case torch.float32 | torch.bfloat16 | torch.float64:
            return Plain(dtype=dtype)
        case torch.float16:
            return Scaled(dtype=dtype, exponent=15, smallest=2.0**-24, signed=signed)
        case torch.float8_e4m3fn:
            return Scaled(dtype=dtype, exponent=8, smallest=2.0**-9, signed=signed)
        case torch.float8_e5m2:
            return Scaled(dtype=dtype, exponent=15, smallest=2.0**-16, signed=signed)
        case torch.int8 if signed:
            return Companded()
        case torch.uint8 if not signed:
            return Root()
    eight = "int8" if signed else "uint8"
    raise CodecError(
        f"{name}_dtype={dtype} has no codec; give torch.float32, float64, bfloat16, float16, float8_e4m3fn, "
        f"float8_e5m2 or {eight}"
    )


@runtime_checkable
class Coded(Protocol):
    """A rule that keeps states by codecs."""

    @property
    def codecs(self) -> Mapping[str, StateCodec]:
        """How each state is stored, by its name."""
        ...


def codecs_of(rule: object) -> Mapping[str, StateCodec]:
    """The codecs of a rule; none for a rule that keeps its states as they are."""
    return rule.codecs if isinstance(rule, Coded) else {}


def scale_name(name: str) -> str:
    """The state that holds the block scales of the state `name`."""
    return f"{name}_scale"


def state_specs(codecs: Mapping[str, StateCodec]) -> tuple[StateSpec, ...]:
    """What a rule declares whose states are kept by `codecs`: the codes under each state's name, and their scales."""
    specs = []
    for name, codec in codecs.items():
        specs.append(StateSpec(name=name, dtype=codec.dtype))
        if codec.block:
            specs.append(StateSpec(name=scale_name(name), kind=StateKind.BLOCK_SCALES, block=codec.block))
    return tuple(specs)


def init_state(codecs: Mapping[str, StateCodec], main: Tensor) -> dict[str, Tensor]:
    """The states of one parameter, all zero, in the layout and on the device of `main`."""
    state = {}
    for name, codec in codecs.items():
        state[name] = torch.zeros_like(main, dtype=codec.dtype, requires_grad=False)
        if codec.block:
            num_blocks = -(-main.numel() // codec.block)
            state[scale_name(name)] = torch.zeros(num_blocks, dtype=torch.float32, device=main.device)
    return state


def _normalised(values: Tensor, scales: Tensor | None, block: int, *, exponent: int | None = None) -> Tensor:
    """Writes each block's scale to `scales`; returns `values` divided by it, with zero for what is not finite.

    The scale is the block's max |x|, or with `exponent` the power of two that takes it below 2^exponent.
    """
    result = torch.empty_like(values)
    for run, part, into in zip(_blocks(values, block), _blocks(result, block), _parts(scales, values, block)):
        largest = torch.linalg.vector_norm(run, ord=torch.inf, dim=1).to(torch.float32)
        scale = largest if exponent is None else _power_of_two(largest, exponent)
        # An infinite scale would make zeros of the finite values beside it; NaN says that they are lost.
        into.copy_(torch.where(largest > 0, scale.clamp(min=TINY), largest).masked_fill_(largest.isinf(), torch.nan))
        torch.div(run, torch.where(into == 0, 1.0, into).to(run.dtype)[:, None], out=part)
    return result.nan_to_num_(0.0)


def _power_of_two(largest: Tensor, exponent: int) -> Tensor:
    """2^(e - exponent) for `largest` in [2^(e-1), 2^e), from 2^-126 on: put together from its bits, hence exact."""
    biased = (torch.frexp(largest).exponent - exponent + 127).clamp(min=1)
    return (biased << 23).view(torch.float32)


def _scaled_(values: Tensor, scales: Tensor | None, block: int) -> Tensor:
    """Multiplies each block by its scale."""
    for run, factor in zip(_blocks(values, block), _parts(scales, values, block)):
        run.mul_(factor[:, None])
    return values


def _blocks(values: Tensor, block: int) -> list[Tensor]:
    """`values` as its full blocks (rows, block) and what is left (1, rest): views, those that are not empty."""
    full = values.numel() // block * block
    parts = [values[:full].view(-1, block), values[full:].view(1, -1)]
    return [part for part in parts if part.numel()]


def _parts(scales: Tensor | None, values: Tensor, block: int) -> list[Tensor]:
    """The scales of the full blocks, and of what is left: views, those that are not empty."""
    assert scales is not None
    full = values.numel() // block
    return [part for part in (scales[:full], scales[full:]) if part.numel()]


def _root(values: Tensor) -> Tensor:
    """The square root, correctly rounded; torch's own of float32 is not on every CPU."""
    return values.sqrt() if values.dtype is torch.float64 else values.double().sqrt_().to(values.dtype)


def _rounded(values: Tensor) -> Tensor:
    """To the nearest integer, halves upwards: unlike halves to even, the same in one instruction on any device."""
    return values.add_(0.5).floor_()
