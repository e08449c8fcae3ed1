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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from opt_kernels.codecs import narrow
from opt_kernels.works import Scalar, StateKind, States, StateSpec, is_on_device

BLOCK = 128  # elements that share a scale: 1/32 byte of scale per element
TINY = torch.finfo(torch.float32).tiny  # smallest normal number: division by a smaller scale would overflow
# The shares of its value by which an average may miss it when it stops, and by which the root of one that is never
# negative may: an update, their quotient, is within 5 %.
STALLED = 0.036
STALLED_ROOT = 0.014
# The largest distance of a stored number from its nearest code, as a share of the number. Small values of 8-bit codes
# are a few codes.
_FLOATS = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
HALF_UNITS = {dtype: torch.finfo(dtype).eps / 2 for dtype in _FLOATS} | {torch.int8: 0.5, torch.uint8: 0.5}
# The same for what is usual in a block, by which noise makes the squares of signed averages larger.
_USUAL = HALF_UNITS | {torch.int8: 2.0**-6}
NOISY = 0.3  # units² beta / (1 - beta) from which on updates are more than 5 % longer
OUTLIER = 2.0**60  # first moments of this size have second moments near the end of float32


class CodecError(ValueError):
    """A state dtype without a codec."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCodec:
    """The storage format of one state: one code per element, and for some codecs one scale per block of elements.

    Methods take flat runs that begin at a multiple of `block`. Every codec stores zeros as zeros.
    """

    dtype: torch.dtype  # of the codes
    signed: bool = True  # False for states that are never negative
    stochastic: bool = False  # whether numbers are rounded stochastically instead of to nearest
    block: ClassVar[int] = 0  # number of elements that share one float32 scale; 0 without scales
    noise_period: ClassVar[int] = narrow.NOISE_BLOCK  # elements after which noise repeats within a block

    @property
    def outlier(self) -> float:
        """Magnitude from which on a value would take the precision from the others of its block."""
        return math.inf

    def decode_(self, values: Tensor, codes: Tensor, scales: Tensor | None) -> None:
        """Write `values` (n,), float32 or float64, from `codes` (n,) and `scales` (ceil(n / block),)."""
        raise NotImplementedError

    def encode_(self, codes: Tensor, scales: Tensor | None, values: Tensor, words: Tensor | None = None) -> None:
        """Write `codes` and `scales` from `values`: to nearest, or stochastically by the noise `words` (n,), int32."""
        raise NotImplementedError


Codecs: TypeAlias = Mapping[str, StateCodec]
"""The codecs of states, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain(StateCodec):
    """The values themselves, rounded to nearest even in `dtype`; no scales. Only bfloat16 can be `stochastic`."""

    dtype: torch.dtype = torch.float32

    def decode_(self, values: Tensor, codes: Tensor, scales: Tensor | None) -> None:
        values.copy_(codes)

    def encode_(self, codes: Tensor, scales: Tensor | None, values: Tensor, words: Tensor | None = None) -> None:
        if words is None:
            codes.copy_(values)
        else:
            narrow.round_(codes, values.float(), words)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCodec(StateCodec):
    """Base class of codecs with one scale per block, which follows from the largest magnitude in it.

    A state that is never negative is stored as its square root, which halves the range of exponents. No positive value
    is stored as zero: with a second moment of zero, a first moment that is not zero would be divided by eps alone. A
    block with a value that is not finite decodes as NaN.
    """

    block = BLOCK

    @property
    def outlier(self) -> float:
        return OUTLIER if self.signed else OUTLIER**2

    @property
    def smallest(self) -> float:
        """The smallest positive code."""
        return 1.0

    def scale_of(self, largest: Tensor) -> Tensor:
        """The scales of blocks whose largest magnitude is `largest`, float32, above zero."""
        raise NotImplementedError

    def factors(self, rows: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Two factors of the codes of blocks `rows` (n, block) before they are rounded; NaN for 0 / 0. `scale` is
        (n, 1)."""
        return rows, 1.0 / torch.where(scale == 0, 1.0, scale).to(rows.dtype)

    def decode_(self, values: Tensor, codes: Tensor, scales: Tensor | None) -> None:
        _multiply_(values.copy_(codes), scales)
        if not self.signed:
            values.square_()

    def encode_(self, codes: Tensor, scales: Tensor | None, values: Tensor, words: Tensor | None = None) -> None:
        assert scales is not None
        x = values if self.signed else _root(values)
        rows = rows_of(x)
        largest = torch.linalg.vector_norm(rows, ord=torch.inf, dim=1).to(torch.float32)
        # The scale of zeros is zero. An infinite one would turn the finite values of its block into zeros; NaN marks
        # them as lost.
        scale = torch.where(largest > 0, self.scale_of(largest), largest)
        scale.masked_fill_(largest.isinf(), torch.nan)
        scales.copy_(scale)
        left, right = self.factors(rows, scale[:, None])
        is_float = self.dtype.is_floating_point
        if words is not None and not is_float:
            left = left.double()  # in which products of float32 numbers are exact
        y = (left * right).view(-1)[: x.numel()].nan_to_num_(0.0)
        if not self.signed:
            y = torch.where(x > 0, y.clamp(min=self.smallest), y)
        if words is None:
            codes.copy_(y if is_float else y.round_())
        elif is_float:
            narrow.round_(codes, y.float(), words)
        else:
            rounded = narrow.rounded_to_integers(y, words)
            codes.copy_(rounded.clamp_(max=torch.iinfo(self.dtype).max))  # float64 may exceed its float32 scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled(BlockCodec):
    """A narrow float with one scale per block. Scales are powers of two, so that scaling is exact.

    scale = 2^(e - exponent) where 2^(e-1) < max |x| <= 2^e, and at least 2^-126; code = x / scale, to nearest even, of
    at most 2^exponent, the largest power of two of the dtype. A maximum that is rounded up to 2^e therefore keeps its
    scale when the decoded values are encoded again.
    """

    @property
    def smallest(self) -> float:
        limits = torch.finfo(self.dtype)
        return limits.smallest_normal * limits.eps

    def scale_of(self, largest: Tensor) -> Tensor:
        exponent = math.frexp(torch.finfo(self.dtype).max)[1] - 1
        # Exact, because it is assembled from bits.
        mantissa, power = torch.frexp(largest)
        biased = (power - (mantissa == 0.5).int() - exponent + 127).clamp(min=1)
        return (biased << 23).view(torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Companded(BlockCodec):
    """Signed 8-bit codes with one scale per block, denser near zero (FlashOptim, arXiv 2602.23349, section 3).

    scale = max |x|; code = round(254 * (x / (|x| + scale))). Back: x = scale * (code / (254 - |code|)).

    Operations are rounded as written, as if sums could not overflow.
    """

    dtype: torch.dtype = torch.int8
    noise_period = narrow.PERIOD_OF_INTEGERS

    def scale_of(self, largest: Tensor) -> Tensor:
        return largest.clamp(min=TINY)

    def factors(self, rows: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        # Sums with a small scale would lose bits if they were halved, and those with a large one overflow if not.
        factor = 1.0 - 0.5 * (scale >= 1).to(rows.dtype)
        sums = rows.abs().double().add_(scale.clamp(min=TINY)).mul_(factor).to(rows.dtype)
        return torch.div(rows, sums, out=sums), 254 * factor

    def decode_(self, values: Tensor, codes: Tensor, scales: Tensor | None) -> None:
        values.copy_(codes)
        _multiply_(values.div_(254 - values.abs()), scales)


@dataclass(frozen=True, slots=True, kw_only=True)
class Root(BlockCodec):
    """Unsigned 8-bit codes of the square root of a state that is never negative, with one scale per block.

    scale = max sqrt(x) / 255; code = round(sqrt(x) * (1 / scale)), at least 1 if x > 0. Back: x = (code * scale)^2.
    """

    dtype: torch.dtype = torch.uint8
    signed: bool = False
    noise_period = narrow.PERIOD_OF_INTEGERS

    def scale_of(self, largest: Tensor) -> Tensor:
        # By a tensor: on GPUs torch divides by a number as a product with its rounded reciprocal.
        return (largest / torch.full_like(largest, 255)).clamp(min=TINY)


def codec_for(name: str, dtype: torch.dtype, *, signed: bool) -> StateCodec:
    """The codec for the state `name` in `dtype`. `signed` is False for states that are never negative.

    Raises CodecError for a dtype without a codec.
    """
    match dtype:
        case torch.float32 | torch.bfloat16 | torch.float64:
            return Plain(dtype=dtype, signed=signed)
        case torch.float16 | torch.float8_e4m3fn | torch.float8_e5m2:
            return Scaled(dtype=dtype, signed=signed)
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


_SCHEMES = {
    torch.float16: "half",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.int8: "companded",
    torch.uint8: "root",
}


def scheme_of(codec: StateCodec) -> str:
    """The name by which compiled sweeps know a codec: "plain", or that of its codes; empty for other codecs."""
    if type(codec) is Plain:
        return "plain"
    return _SCHEMES.get(codec.dtype, "") if type(codec) in (Scaled, Companded, Root) else ""


def stalls(codec: StateCodec, beta: Scalar | str) -> bool:
    """Whether an average x <- x + (1 - beta) (y - x), rounded to nearest, may stop too far from a constant y.

    It stops where its change is below half a unit: up to half_unit beta / (1 - beta) of its value from y. Updates
    divide by the root of an average that is never negative, which misses by half of that; codecs with scales store the
    root. True for a beta on an accelerator, which the host does not read.
    """
    half_unit = HALF_UNITS.get(codec.dtype, 0.0)
    if half_unit and is_on_device(beta):
        return True
    if not (codec.signed or codec.block):
        half_unit /= 2
    allowed = STALLED if codec.signed else STALLED_ROOT
    return half_unit * float(beta) > allowed * (1 - float(beta))


def largest_beta(codec: StateCodec) -> float:
    """The beta up to which the noise of stochastic rounding makes updates at most 5 % longer.

    Of a signed average: each step adds noise, and that of about 1 / (1 - beta) steps remains. Divided by the roots of
    averages that are never negative, updates stay within 1 % up to 0.9999.
    """
    if not codec.signed or codec.dtype not in _USUAL:
        return 1.0
    return NOISY / (NOISY + _USUAL[codec.dtype] ** 2)


def codecs_of(rule: object) -> Codecs:
    """The codecs of a rule; empty for a rule that stores its states as they are."""
    codecs: Codecs = getattr(rule, "codecs", {})
    return codecs


def scale_name(name: str) -> str:
    """The name of the state that holds the block scales of the state `name`."""
    return f"{name}_scale"


def state_specs(codecs: Codecs) -> tuple[StateSpec, ...]:
    """The specs of states stored by `codecs`: the codes, under the name of the state, and their scales."""
    specs = []
    for name, codec in codecs.items():
        specs.append(StateSpec(name=name, dtype=codec.dtype))
        if codec.block:
            specs.append(StateSpec(name=scale_name(name), kind=StateKind.BLOCK_SCALES, block=codec.block))
    return tuple(specs)


def init_state(codecs: Codecs, main: Tensor) -> States:
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


def _multiply_(values: Tensor, scales: Tensor | None) -> None:
    """Multiply each block of `values` (n,) by its scale."""
    assert scales is not None
    full, rest = divmod(values.numel(), BLOCK)
    values[: full * BLOCK].view(-1, BLOCK).mul_(scales[:full, None])
    if rest:
        values[full * BLOCK :].mul_(scales[full])


def rows_of(values: Tensor) -> Tensor:
    """`values` (n,) as one row for each block, the last one padded with zeros."""
    missing = -values.numel() % BLOCK
    padded = torch.cat([values, values.new_zeros(missing)]) if missing else values
    return padded.view(-1, BLOCK)


def _root(values: Tensor) -> Tensor:
    """The correctly rounded square root. torch's float32 square root is not correctly rounded on every CPU."""
    if values.dtype is torch.float64:
        return values.sqrt()
    return values.double().sqrt_().to(values.dtype)
