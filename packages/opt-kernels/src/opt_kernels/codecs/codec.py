"""Codecs: the storage formats of state tensors between steps.

Narrow codecs scale by block, not by tensor: a scale can be computed while its block is in registers, so one pass
suffices, and an outlier costs precision in 128 elements instead of a million. Checkpoints store decoded float32 values,
not codes.

An average x <- x + (1 - beta) (y - x) that is rounded to nearest stops where its change is below half a unit in the
last place of its format. For pairs of beta and format for which this matters (`stalls`), sweeps get a codec that rounds
stochastically, as `narrow` describes: the average then follows y on average.

An infinite, NaN or huge value would cost the others of its block everything. Sweeps therefore reset the states of such
an element to zero (`without_outliers`); its weight is updated as with states in float32.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from opt_kernels.codecs import narrow
from opt_kernels.works import StateKind, StateSpec

BLOCK = 128  # elements that share a scale: 1/32 byte of scale per element
TINY = torch.finfo(torch.float32).tiny  # smallest normal number: division by a smaller scale would overflow
STALLED = 0.05  # share of its value by which an average may miss it when it stops
# The largest distance of a stored number from its nearest code, as a share of the number. Small values of 8-bit codes
# are a few codes.
_FLOATS = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
HALF_UNITS = {dtype: torch.finfo(dtype).eps / 2 for dtype in _FLOATS} | {torch.int8: 0.5, torch.uint8: 0.5}
OUTLIER = 2.0**60  # first moments of this size have second moments near the end of float32


class CodecError(ValueError):
    """A state dtype without a codec."""


class StateCodec(Protocol):
    """The storage format of one state: one code per element, and for some codecs one scale per block of elements.

    Both methods take flat runs that begin at a multiple of `block`. Every codec stores zeros as zeros.
    """

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the codes."""
        ...

    @property
    def block(self) -> int:
        """Number of elements that share one float32 scale; 0 without scales."""
        ...

    @property
    def outlier(self) -> float:
        """Magnitude from which on a value would take the precision from the others of its block."""
        ...

    @property
    def stochastic(self) -> bool:
        """Whether numbers are rounded stochastically instead of to nearest."""
        ...

    def decode_(self, values: Tensor, codes: Tensor, scales: Tensor | None) -> None:
        """Write `values` (n,), float32 or float64, from `codes` (n,) and `scales` (ceil(n / block),)."""
        ...

    def encode_(self, codes: Tensor, scales: Tensor | None, values: Tensor, words: Tensor | None = None) -> None:
        """Write `codes` and `scales` from `values`: to nearest, or stochastically by the noise `words` (n,), int32."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """The values themselves, rounded to nearest even in `dtype`; no scales."""

    dtype: torch.dtype = torch.float32
    stochastic: bool = False  # bfloat16 only

    block = 0
    outlier = math.inf

    def decode_(self, values: Tensor, codes: Tensor, scales: Tensor | None) -> None:
        values.copy_(codes)

    def encode_(self, codes: Tensor, scales: Tensor | None, values: Tensor, words: Tensor | None = None) -> None:
        if words is None:
            codes.copy_(values)
        else:
            narrow.round_(codes, values.float(), words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """A narrow float with one scale per block. Scales are powers of two, so that scaling is exact.

    scale = 2^(e - exponent) where 2^(e-1) < max |x| <= 2^e, and at least 2^-126; code = x / scale, to nearest even. A
    maximum that is rounded up to 2^e therefore keeps its scale when the decoded values are encoded again.
    A state that is never negative is stored as its square root, which halves the range of exponents. No positive value
    is stored as zero: with a second moment of zero, a first moment that is not zero would be divided by eps alone. A
    block with a value that is not finite decodes as NaN.
    """

    dtype: torch.dtype
    exponent: int  # codes are at most 2^exponent
    smallest: float  # the smallest positive code
    signed: bool
    block: int = BLOCK
    stochastic: bool = False

    @property
    def outlier(self) -> float:
        return OUTLIER if self.signed else OUTLIER**2

    def decode_(self, values: Tensor, codes: Tensor, scales: Tensor | None) -> None:
        _scaled_(values.copy_(codes), scales, self.block)
        if not self.signed:
            values.square_()

    def encode_(self, codes: Tensor, scales: Tensor | None, values: Tensor, words: Tensor | None = None) -> None:
        x = values if self.signed else _root(values)
        y = torch.empty_like(x)
        for run, share, scale in _rows(x, y, scales, self.block):
            _scale_(scale, run, lambda largest: _power_of_two(largest, self.exponent))
            torch.div(run, torch.where(scale == 0, 1.0, scale).to(run.dtype)[:, None], out=share)
        y.nan_to_num_(0.0)
        if not self.signed:
            y = torch.where(x > 0, y.clamp(min=self.smallest), y)
        if words is None:
            codes.copy_(y)
        else:
            self._round_(codes, y.float(), words)

    def _round_(self, codes: Tensor, y: Tensor, words: Tensor) -> None:
        """Write the codes of `y` (float32), rounded stochastically.

        Codes are integers with their fraction in the lower bits of a word, which is that of a float32 with another
        bias; below the smallest normal number, a multiple of the smallest code.
        """
        limits = torch.finfo(self.dtype)
        exponent = round(math.log2(limits.smallest_normal))
        shift = 23 + round(math.log2(limits.eps))
        size = y.abs()
        small = (size.clamp(max=limits.smallest_normal) * 2.0 ** (23 - exponent)).to(torch.int32)
        normal = size.view(torch.int32) - ((126 + exponent) << 23)
        fixed = torch.where(size < limits.smallest_normal, small, normal)
        rounded = fixed.add_(narrow.upper_bits(words, shift)).bitwise_right_shift_(shift)
        integers = torch.int16 if self.dtype.itemsize == 2 else torch.uint8
        sign = y.signbit().to(torch.int32) << (8 * self.dtype.itemsize - 1)
        codes.view(integers).copy_(rounded.bitwise_or_(sign))


@dataclass(frozen=True, slots=True, kw_only=True)
class Companded:
    """Signed 8-bit codes with one scale per block, denser near zero (FlashOptim, arXiv 2602.23349, section 3).

    scale = max |x|; code = round(254 * (x / (|x| + scale))). Back: x = scale * (code / (254 - |code|)).

    Operations are rounded as written, as if sums could not overflow. A block with a value that is not finite decodes
    as NaN.
    """

    block: int = BLOCK
    stochastic: bool = False

    dtype = torch.int8
    outlier = OUTLIER

    def decode_(self, values: Tensor, codes: Tensor, scales: Tensor | None) -> None:
        values.copy_(codes)
        _scaled_(values.div_(254 - values.abs()), scales, self.block)

    def encode_(self, codes: Tensor, scales: Tensor | None, values: Tensor, words: Tensor | None = None) -> None:
        y = torch.empty_like(values)
        for run, share, scale in _rows(values, y, scales, self.block):
            _scale_(scale, run, lambda largest: largest.clamp(min=TINY))
            # Sums with a small scale would lose bits if they were halved, and those with a large one overflow if not.
            ones = torch.ones_like(scale)
            factor = torch.where(scale < 1, ones, 0.5).to(run.dtype)[:, None]
            sums = run.abs().double().add_(scale[:, None].clamp(min=TINY)).mul_(factor).to(run.dtype)
            torch.div(run, sums, out=share).mul_(254 * factor)
        y.nan_to_num_(0.0)
        codes.copy_(y.round_() if words is None else _rounded_by(words, y))


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """Unsigned 8-bit codes of the square root of a state that is never negative, with one scale per block.

    scale = max sqrt(x) / 255; code = round(sqrt(x) * (1 / scale)), at least 1 if x > 0. Back: x = (code * scale)^2.

    With a second moment of zero, a first moment that is not zero would be divided by eps alone. A block with a value
    that is not finite decodes as NaN.
    """

    block: int = BLOCK
    stochastic: bool = False

    dtype = torch.uint8
    outlier = OUTLIER**2

    def decode_(self, values: Tensor, codes: Tensor, scales: Tensor | None) -> None:
        _scaled_(values.copy_(codes), scales, self.block).square_()

    def encode_(self, codes: Tensor, scales: Tensor | None, values: Tensor, words: Tensor | None = None) -> None:
        root = _root(values)
        y = torch.empty_like(root)
        for run, share, scale in _rows(root, y, scales, self.block):
            # By a tensor: on GPUs torch divides by a number as a product with its rounded reciprocal.
            _scale_(scale, run, lambda largest: (largest / torch.full_like(largest, 255)).clamp(min=TINY))
            torch.mul(run, 1.0 / torch.where(scale == 0, 1.0, scale).to(run.dtype)[:, None], out=share)
        y.nan_to_num_(0.0)
        y = y.round_() if words is None else _rounded_by(words, y.clamp_(max=255))
        codes.copy_(torch.where(root > 0, y.clamp(min=1), y))


def codec_for(name: str, dtype: torch.dtype, *, signed: bool) -> StateCodec:
    """The codec for the state `name` in `dtype`. `signed` is False for states that are never negative.

    Raises CodecError for a dtype without a codec.
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
    if isinstance(dtype, str):
        raise CodecError(f"{name}_dtype={dtype!r} is a string; pass a dtype, such as torch.{eight}")
    raise CodecError(
        f"{name}_dtype={dtype} has no codec; pass torch.float32, float64, bfloat16, float16, float8_e4m3fn, "
        f"float8_e5m2 or {eight}"
    )


def stalls(codec: StateCodec, beta: float | Tensor | str, *, signed: bool) -> bool:
    """Whether an average x <- x + (1 - beta) (y - x), rounded to nearest, may stop more than 5 % from a constant y.

    It stops where its change is below half a unit: up to half_unit beta / (1 - beta) of its value from y. Updates
    divide by the root of an average that is never negative, which misses by half of that; `Scaled` and `Root` store the
    root. True for a beta on an accelerator, which the host does not read.
    """
    if isinstance(beta, Tensor) and beta.device.type != "cpu":
        return True
    half_unit = HALF_UNITS.get(codec.dtype, 0.0)
    if not signed and not codec.block:
        half_unit /= 2
    return half_unit * float(beta) > STALLED * (1 - float(beta))


def stochastic(codec: StateCodec) -> StateCodec:
    """The codec that rounds stochastically."""
    return replace(codec, stochastic=True)  # type: ignore[type-var]


def codecs_of(rule: object) -> Mapping[str, StateCodec]:
    """The codecs of a rule; empty for a rule that stores its states as they are."""
    codecs: Mapping[str, StateCodec] = getattr(rule, "codecs", {})
    return codecs


def scale_name(name: str) -> str:
    """The name of the state that holds the block scales of the state `name`."""
    return f"{name}_scale"


def state_specs(codecs: Mapping[str, StateCodec]) -> tuple[StateSpec, ...]:
    """The specs of states stored by `codecs`: the codes, under the name of the state, and their scales."""
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


def without_outliers(codecs: Sequence[StateCodec], values: Sequence[Tensor]) -> Sequence[Tensor]:
    """The new states of one run, with zeros in all of them for elements of which one would spoil its block: it is NaN,
    or at least `outlier`.

    Not in this state alone: with a second moment of zero, a first moment that stays would be divided by eps alone.
    """
    shared = [(value, codec.outlier) for codec, value in zip(codecs, values, strict=True) if codec.block]
    if all(_is_known_below(value, limit) for value, limit in shared):
        return values
    kept = torch.stack([value.abs() < limit for value, limit in shared]).all(0)
    return [torch.where(kept, value, 0.0) for value in values]


def _is_known_below(value: Tensor, limit: float) -> bool:
    """Whether all magnitudes are below `limit`. The host reads no tensor of another device."""
    if value.device.type != "cpu" or not value.numel():
        return not value.numel()
    return bool(torch.linalg.vector_norm(value, ord=torch.inf) < limit)


def _scale_(scale: Tensor, run: Tensor, of_largest: Callable[[Tensor], Tensor]) -> None:
    """Write the scales (rows,) of the blocks in `run` (rows, block), from the largest |x| of each, float32.

    The scale of zeros is zero. An infinite one would turn the finite values of its block into zeros; NaN marks them as
    lost.
    """
    largest = torch.linalg.vector_norm(run, ord=torch.inf, dim=1).to(torch.float32)
    finite = torch.where(largest > 0, of_largest(largest), largest)
    scale.copy_(finite.masked_fill_(largest.isinf(), torch.nan))


def _power_of_two(largest: Tensor, exponent: int) -> Tensor:
    """2^(e - exponent) for `largest` in (2^(e-1), 2^e], at least 2^-126. Exact, because it is assembled from bits."""
    mantissa, power = torch.frexp(largest)
    biased = (power - (mantissa == 0.5).int() - exponent + 127).clamp(min=1)
    return (biased << 23).view(torch.float32)


def _scaled_(values: Tensor, scales: Tensor | None, block: int) -> Tensor:
    """Multiply each block by its scale."""
    for run, factor in zip(_blocks(values, block), _parts(scales, values, block)):
        run.mul_(factor[:, None])
    return values


def _rows(values: Tensor, result: Tensor, scales: Tensor | None, block: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The blocks of `values` with those of `result` and their scales: first the full ones, then the rest."""
    return zip(_blocks(values, block), _blocks(result, block), _parts(scales, values, block))


def _blocks(values: Tensor, block: int) -> list[Tensor]:
    """Views of `values`: its full blocks (rows, block) and the rest (1, rest), except empty ones."""
    full = values.numel() // block * block
    parts = [values[:full].view(-1, block), values[full:].view(1, -1)]
    return [part for part in parts if part.numel()]


def _parts(scales: Tensor | None, values: Tensor, block: int) -> list[Tensor]:
    """Views of the scales of the full blocks and of the rest, except empty ones."""
    assert scales is not None
    full = values.numel() // block
    return [part for part in (scales[:full], scales[full:]) if part.numel()]


def _rounded_by(words: Tensor, y: Tensor) -> Tensor:
    """`y`, of at most 255, rounded to integers (int32) stochastically: with 16 bits of its fraction, plus noise.

    The noise is odd, so that a code whose product was rounded down stays.
    """
    fixed = (y.float() * 65536.0).to(torch.int32)
    return fixed.add_(narrow.upper_bits(words, 16).bitwise_or_(1)).bitwise_right_shift_(16)


def _root(values: Tensor) -> Tensor:
    """The correctly rounded square root. torch's float32 square root is not correctly rounded on every CPU."""
    if values.dtype is torch.float64:
        return values.sqrt()
    return values.double().sqrt_().to(values.dtype)
