"""Codecs, the bf16 remainder and stochastic rounding: every bit pattern that matters."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from opt_kernels.codecs import CodecError, StateCodec, codec_for, init_state, narrow, scale_name

pytestmark = pytest.mark.usefixtures("poisoned")

SIGNED: Mapping[str, StateCodec] = {
    "fp32": codec_for("x", torch.float32, signed=True),
    "bf16": codec_for("x", torch.bfloat16, signed=True),
    "fp16": codec_for("x", torch.float16, signed=True),
    "fp8": codec_for("x", torch.float8_e4m3fn, signed=True),
    "e5m2": codec_for("x", torch.float8_e5m2, signed=True),
    "int8": codec_for("x", torch.int8, signed=True),
}
SQUARES: Mapping[str, StateCodec] = {
    "fp32": codec_for("x", torch.float32, signed=False),
    "bf16": codec_for("x", torch.bfloat16, signed=False),
    "fp16": codec_for("x", torch.float16, signed=False),
    "fp8": codec_for("x", torch.float8_e4m3fn, signed=False),
    "e5m2": codec_for("x", torch.float8_e5m2, signed=False),
    "uint8": codec_for("x", torch.uint8, signed=False),
}
BLOCKED = {f"signed {k}": c for k, c in SIGNED.items() if c.block} | {
    f"square {k}": c for k, c in SQUARES.items() if c.block
}
SIZES = [0, 1, 63, 127, 128, 129, 1025]


def stored(codec: StateCodec, values: Tensor) -> dict[str, Tensor]:
    """`values` (n,) as the codec keeps them."""
    state = init_state({"x": codec}, values)
    codec.encode_(state["x"], state.get(scale_name("x")), values)
    return state


def read(codec: StateCodec, state: Mapping[str, Tensor]) -> Tensor:
    """What the codec kept, in float32."""
    values = torch.full(state["x"].shape, torch.nan)
    codec.decode_(values, state["x"], state.get(scale_name("x")))
    return values


def sample(numel: int, *, signed: bool) -> Tensor:
    """Numbers over some six decades, some of them zero."""
    generator = torch.Generator().manual_seed(numel)
    noise = torch.randn(3, numel, generator=generator)
    x = noise[0] * torch.exp(3 * noise[1]) * (noise[2] > -1)
    return x if signed else x.square()


def largest_of_block(values: Tensor, block: int) -> Tensor:
    """For each element the largest size in its block."""
    return torch.cat([part.abs().max().expand_as(part) for part in torch.split(values, block) if part.numel()])


ERRORS = {"fp32": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-11, "fp8": 2.0**-4, "e5m2": 2.0**-3}


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("name", ERRORS)
def test_a_float_code_is_the_number_rounded(name: str, numel: int) -> None:
    x = sample(numel, signed=True)
    codec = SIGNED[name]
    error = (read(codec, stored(codec, x)) - x).abs()
    allowed = ERRORS[name] * x.abs()
    if codec.block and numel:
        # Below its normal range a code has a fixed spacing: 2^-24 of at least 2^14, 2^-9 of at least 2^7; half is lost.
        floor = 2.0**-24 / 2**14 if name == "fp16" else 2.0**-9 / 2**7
        allowed = torch.maximum(allowed, largest_of_block(x, codec.block) * floor / 2)
    assert (error <= allowed).all()


@pytest.mark.parametrize("numel", SIZES[1:])
def test_an_8_bit_mean_is_denser_near_zero(numel: int) -> None:
    x = sample(numel, signed=True)
    codec = SIGNED["int8"]
    n = x / largest_of_block(x, codec.block)
    back = read(codec, stored(codec, x)) / largest_of_block(x, codec.block)
    # y = 2n / (1 + |n|) is rounded to half of 1/127; dn/dy = (1 + |n|)^2 / 2, at most 2, and 1/2 at zero.
    slope = (1 + torch.maximum(n.abs(), back.abs())).square() / 2
    assert ((back - n).abs() <= slope * (0.5 / 127) + 1e-6).all()


@pytest.mark.parametrize("numel", SIZES[1:])
def test_an_8_bit_square_is_a_rounded_root(numel: int) -> None:
    x = sample(numel, signed=False)
    codec = SQUARES["uint8"]
    largest = largest_of_block(x, codec.block).sqrt()
    root, back = x.sqrt() / largest, read(codec, stored(codec, x)).sqrt() / largest
    lifted = (x > 0) & (root < 0.5 / 255)
    assert ((back - root).abs()[~lifted] <= 0.5 / 255 + 1e-6).all()
    assert torch.allclose(back[lifted], torch.tensor(1 / 255), rtol=1e-5)


@pytest.mark.parametrize("codec", SQUARES.values(), ids=SQUARES.keys())
def test_a_positive_square_is_never_stored_as_zero(codec: StateCodec) -> None:
    x = torch.logspace(-30, 0, 256)
    assert (read(codec, stored(codec, x)) > 0).all()


@pytest.mark.parametrize("codec", BLOCKED.values(), ids=BLOCKED.keys())
@pytest.mark.parametrize("numel", SIZES)
def test_zeros_stay_zero_and_storing_twice_is_storing_once(codec: StateCodec, numel: int) -> None:
    assert not read(codec, stored(codec, torch.zeros(numel))).any()
    signed = codec in SIGNED.values()
    values = sample(numel, signed=signed)
    once = read(codec, stored(codec, values))
    # A regression: raising small codes to the smallest was done in place, before zeros were set apart from them.
    assert not once[values == 0].any()
    twice = read(codec, stored(codec, once))
    # Equal but where a float's largest code was rounded up to a power of two: subnormals are then twice as far apart.
    spacing = 2.0**-9 * 2.0**-7
    assert torch.allclose(once, twice, rtol=1e-6, atol=float(once.abs().max()) * spacing if numel else 0)
    if codec.dtype in (torch.int8, torch.uint8):
        assert torch.equal(stored(codec, once)["x"], stored(codec, twice)["x"])


@pytest.mark.parametrize("codec", BLOCKED.values(), ids=BLOCKED.keys())
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_spoils_its_block_and_no_other(codec: StateCodec, bad: float) -> None:
    x = torch.rand(384) + 0.5
    x[130] = bad
    back = read(codec, stored(codec, x))
    assert back[128:256].isnan().all()
    assert back[:128].isfinite().all()
    assert back[256:].isfinite().all()


@pytest.mark.parametrize("codec", BLOCKED.values(), ids=BLOCKED.keys())
@pytest.mark.parametrize("size", [1e-45, 1e-38, 1e-30, 1e30, 2.9e38])  # e5m2 rounds the root of 3e38 up to 2^64
def test_blocks_of_any_size_survive(codec: StateCodec, size: float) -> None:
    x = torch.full((128,), size)
    back = read(codec, stored(codec, x))
    assert back.isfinite().all()
    if size >= 1e-30:
        assert torch.allclose(back, x, rtol=2.0**-3)


def test_dtypes_without_a_codec_are_refused() -> None:
    with pytest.raises(CodecError, match=r"exp_avg_dtype=torch\.int32 has no codec"):
        codec_for("exp_avg", torch.int32, signed=True)


# --- the bf16 remainder ---------------------------------------------------------------------


def words(upper: Tensor, lower: list[int]) -> Tensor:
    """Every float32 whose upper half is one of `upper` and whose lower half is one of `lower`."""
    both = (upper.to(torch.int64)[:, None] << 16) + torch.tensor(lower)
    return (both - (both >= 1 << 31).to(torch.int64) * (1 << 32)).to(torch.int32).flatten().view(torch.float32)


# Every sign, exponent and mantissa that bfloat16 has, beside the lower halves at and around a tie, none and all.
EVERY_UPPER_HALF = words(torch.arange(1 << 16), [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])


def split(main: Tensor) -> tuple[Tensor, Tensor]:
    """The halves of `main`."""
    weight, rest = torch.empty(main.numel(), dtype=torch.bfloat16), torch.empty(main.numel(), dtype=torch.int16)
    narrow.split_(weight, rest, main)
    return weight, rest


def test_the_remainder_loses_nothing_and_keeps_nan() -> None:
    main = EVERY_UPPER_HALF
    weight, rest = split(main)
    back = narrow.join(weight, rest)
    nan = main.isnan()
    assert torch.equal(back.view(torch.int32)[~nan], main.view(torch.int32)[~nan])
    assert back[nan].isnan().all()
    assert weight[nan].isnan().all(), "a NaN of the main is hidden from the model"


def test_the_weight_is_the_main_rounded_with_ties_away_from_zero() -> None:
    main = EVERY_UPPER_HALF[~EVERY_UPPER_HALF.isnan()]
    weight, _ = split(main)
    tie = (main.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(weight[~tie].view(torch.int16), main[~tie].bfloat16().view(torch.int16))
    upper = main[tie].view(torch.int32) >> 16
    assert torch.equal(weight[tie].view(torch.int16).to(torch.int32), ((upper + 1 + 0x8000) & 0xFFFF) - 0x8000)


# --- stochastic rounding --------------------------------------------------------------------


def test_stochastic_rounding_is_unbiased() -> None:
    numel, fraction = 1 << 16, 0x3000 / 0x10000
    x = torch.full((numel,), 1.0) + fraction * 2.0**-7
    rounded = torch.empty(numel, dtype=torch.bfloat16)
    narrow.round_(rounded, x, first=0, step=1)
    assert set(rounded.tolist()) == {1.0, 1.0078125}
    # Four standard deviations of the binomial share.
    share = (rounded > 1).double().mean()
    assert abs(share - fraction) < 4 * (fraction * (1 - fraction) / numel) ** 0.5


def test_the_noise_of_neighbours_and_of_steps_is_unrelated() -> None:
    draws = [narrow.noise(1 << 14, first=f, step=s, device=torch.device("cpu")) for f, s in ((0, 1), (1, 1), (0, 2))]
    centred = torch.stack(draws).double() - 32767.5
    correlation = torch.corrcoef(centred)
    # Of independent draws: 1 / sqrt(2^14), four times.
    assert (correlation - torch.eye(3)).abs().max() < 4 / 128
    assert centred.mean().abs() < 4 * 18919 / (3 * 2**14) ** 0.5


def test_what_is_not_finite_is_cast_as_it_is() -> None:
    x = torch.tensor([torch.inf, -torch.inf, torch.nan])
    rounded = torch.empty(3, dtype=torch.bfloat16)
    narrow.round_(rounded, x, first=0, step=1)
    assert torch.equal(rounded[:2].float(), x[:2])
    assert rounded[2].isnan()
