"""The device functions of storage: remainders, narrow codes and rounding, over every upper half of a float32."""

import math
from dataclasses import replace

import pytest
import torch
from ties import companded_ties
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from opt_kernels.backends.elements import LayoutError
from opt_kernels.backends.triton import jit, tl
from opt_kernels.backends.triton.formats import triton_dtype
from opt_kernels.backends.triton.lanes import join, lower_half, nearest, noise, upper_half
from opt_kernels.backends.triton.quantize import from_fp8, read_state, scheme, to_fp8, write_state
from opt_kernels.codecs import Scaled, StateCodec, codec_for, narrow

pytestmark = pytest.mark.needs_extra

BLOCK = 1024


@jit
def split_kernel(
    main: tl.tensor, weight: tl.tensor, remainder: tl.tensor, joined: tl.tensor, BLOCK: tl.constexpr
) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    w = tl.load(main + at)
    upper, lower = upper_half(w), lower_half(w)
    tl.store(weight + at, upper)
    tl.store(remainder + at, lower)
    tl.store(joined + at, join(upper, lower))


@jit
def nearest_kernel(x: tl.tensor, y: tl.tensor, DTYPE: tl.constexpr, BLOCK: tl.constexpr) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, nearest(tl.load(x + at), DTYPE))


@jit
def fp8_kernel(x: tl.tensor, codes: tl.tensor, back: tl.tensor, SCHEME: tl.constexpr, BLOCK: tl.constexpr) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    code = to_fp8(tl.load(x + at), SCHEME)
    tl.store(codes + at, code)
    tl.store(back + at, from_fp8(code, SCHEME))


@jit
def noise_kernel(out: tl.tensor, first: tl.tensor, step: tl.tensor, BLOCK: tl.constexpr) -> None:
    at = tl.arange(0, BLOCK)
    tl.store(out + at, noise(at, tl.load(first), tl.load(step)).to(tl.int32))


@jit
def state_kernel(
    codes: tl.tensor, scales: tl.tensor, values: tl.tensor, back: tl.tensor, n: tl.tensor,
    DTYPE: tl.constexpr, SCHEME: tl.constexpr, SIGNED: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    at = tl.arange(0, BLOCK)
    x = tl.load(values + at, mask=at < n, other=0.0)
    write_state(codes, scales, x, 0, n, DTYPE, BLOCK, SCHEME, SIGNED, True, False)
    y = read_state(codes, scales, 0, n, BLOCK, SCHEME, SIGNED, True, False)
    tl.store(back + at, y, mask=at < n)


def words(values: Tensor) -> Tensor:
    return values.view(torch.int32)


def every_upper_half() -> Tensor:
    """float32 numbers with every upper half there is, each with lower halves at and about its ties."""
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int64)
    word = (torch.arange(1 << 16, dtype=torch.int64)[:, None] << 16) + lower
    flat = word.flatten()
    return (flat - ((flat >> 31) << 32)).to(torch.int32).view(torch.float32)


def test_remainders_are_the_reference_for_every_exponent_tie_and_special(kernel_device: torch.device) -> None:
    main = every_upper_half().to(kernel_device)
    weight, expected_weight = (torch.empty_like(main, dtype=torch.bfloat16) for _ in range(2))
    remainder, expected_remainder = (torch.empty_like(main, dtype=torch.int16) for _ in range(2))
    joined = torch.empty_like(main)
    # A wide tile: under the interpreter a program costs the same for any number of lanes.
    split_kernel[(main.numel() // 65536,)](main, weight.view(torch.int16), remainder, joined, BLOCK=65536)
    narrow.split_(expected_weight, expected_remainder, main)
    assert torch.equal(weight.view(torch.int16), expected_weight.view(torch.int16))
    assert torch.equal(remainder, expected_remainder)
    ordinary = ~main.isnan()
    assert torch.equal(words(joined)[ordinary], words(main)[ordinary])
    assert joined[~ordinary].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_to_nearest_is_torchs(dtype: torch.dtype, kernel_device: torch.device) -> None:
    x = every_upper_half().to(kernel_device)
    y = torch.empty_like(x, dtype=dtype)
    nearest_kernel[(x.numel() // 65536,)](x, y, DTYPE=triton_dtype(dtype), BLOCK=65536)
    ordinary = ~x.isnan()
    assert torch.equal(y[ordinary], x.to(dtype)[ordinary])
    assert y[~ordinary].isnan().all()


FP8 = {"e4m3": (torch.float8_e4m3fn, 256), "e5m2": (torch.float8_e5m2, 2**15)}


@pytest.mark.parametrize("name", FP8)
def test_fp8_codes_are_torchs_over_their_whole_range(name: str, kernel_device: torch.device) -> None:
    dtype, end = FP8[name]
    x = every_upper_half()
    x = x[x.abs() < end]
    x = torch.cat([x, x.new_zeros(-x.numel() % 65536)]).to(kernel_device)
    codes, back = torch.empty_like(x, dtype=torch.uint8), torch.empty_like(x)
    fp8_kernel[(x.numel() // 65536,)](x, codes, back, SCHEME=name, BLOCK=65536)
    expected = x.to(dtype)
    assert torch.equal(codes, expected.view(torch.uint8))
    assert torch.equal(back, expected.float())


@pytest.mark.parametrize("first", [0, 64, 2**32 - 512, 2**32, 2**40 + 192])
@pytest.mark.parametrize("step", [1, 2**31 - 1])
def test_noise_is_that_of_the_reference(first: int, step: int, kernel_device: torch.device) -> None:
    out = torch.empty(BLOCK, dtype=torch.int32, device=kernel_device)
    number = torch.tensor(first, dtype=torch.int64, device=kernel_device)
    count = torch.tensor(step, dtype=torch.int32, device=kernel_device)
    noise_kernel[(1,)](out, number, count, BLOCK=BLOCK)
    assert torch.equal(out, narrow.noise(BLOCK, first=first, step=step, device=kernel_device))


CODECS = {
    "fp32": codec_for("m", torch.float32, signed=True),
    "bf16": codec_for("m", torch.bfloat16, signed=True),
    "fp16-signed": codec_for("m", torch.float16, signed=True),
    "fp16-root": codec_for("v", torch.float16, signed=False),
    "fp8-signed": codec_for("m", torch.float8_e4m3fn, signed=True),
    "fp8-root": codec_for("v", torch.float8_e4m3fn, signed=False),
    "e5m2-signed": codec_for("m", torch.float8_e5m2, signed=True),
    "e5m2-root": codec_for("v", torch.float8_e5m2, signed=False),
    "int8": codec_for("m", torch.int8, signed=True),
    "uint8-root": codec_for("v", torch.uint8, signed=False),
}


def awkward_values(n: int, *, signed: bool) -> Tensor:
    """Blocks of ordinary, tiny, huge, subnormal and zero values, and one with a NaN and one with an infinity."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(n, generator=generator) * 10 ** (-6 * torch.rand(n, generator=generator))
    if not signed:
        x = x.square()
    for block, factor in enumerate((1.0, 1e-30, 1e30, 1e-42, 0.0, 1.0, 1.0)):
        x[block * 128 : (block + 1) * 128] *= factor
    for at, special in ((5 * 128 + 3, math.nan), (6 * 128 + 9, math.inf)):
        if at < n:
            x[at] = special
    return x


def state_through_the_kernel(codec: StateCodec, x: Tensor, *, signed: bool) -> tuple[Tensor, Tensor, Tensor]:
    codes = torch.empty_like(x, dtype=codec.dtype)
    scales = torch.empty(-(-x.numel() // 128), device=x.device)
    back = torch.empty_like(x)
    raw = codes.view(torch.uint8) if codec.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) else codes
    state_kernel[(1,)](
        raw, scales, x, back, x.numel(),
        DTYPE=triton_dtype(codec.dtype), SCHEME=scheme(codec), SIGNED=signed, BLOCK=BLOCK,
    )  # fmt: skip
    return codes, scales, back


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("n", [1, 63, 128, 1000, 1024])
def test_a_narrow_state_is_written_and_read_as_its_codec_does(name: str, n: int, kernel_device: torch.device) -> None:
    codec, signed = CODECS[name], "root" not in name
    x = awkward_values(n, signed=signed).to(kernel_device)
    codes, scales, back = state_through_the_kernel(codec, x, signed=signed)
    expected_codes, expected_scales = torch.empty_like(codes), torch.empty_like(scales)
    expected = torch.empty_like(x)
    codec.encode_(expected_codes, expected_scales if codec.block else None, x.clone())
    codec.decode_(expected, expected_codes, expected_scales if codec.block else None)
    # Roots of torch may be a unit off the correctly rounded one; a code then differs once in a thousand, by one.
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[codes.itemsize]
    ordinary = ~expected.isnan()
    distance = (codes.view(integers).int() - expected_codes.view(integers).int()).abs()[ordinary]
    assert (distance <= 1).all()
    assert (distance > 0).sum() <= 2
    if codec.block:
        torch.testing.assert_close(scales, expected_scales, rtol=2**-22, atol=0, equal_nan=True)
    same = distance == 0
    torch.testing.assert_close(back[ordinary][same], expected[ordinary][same], rtol=2**-20, atol=1e-44)
    assert back[~ordinary].isnan().all()


@pytest.mark.parametrize("exponent", [-126, -123, -1, 0, 126, 127])
def test_ties_below_a_scale_of_any_size_are_rounded_as_the_codec_rounds_them(
    exponent: int, kernel_device: torch.device
) -> None:
    # Halves of subnormal values lost their last bit before they were added to half of a scale.
    x = companded_ties(exponent, num_groups=BLOCK // 128)
    codes, scales, _ = state_through_the_kernel(CODECS["int8"], x.to(kernel_device), signed=True)
    expected_codes, expected_scales = torch.empty_like(codes, device="cpu"), torch.empty_like(scales, device="cpu")
    CODECS["int8"].encode_(expected_codes, expected_scales, x)
    assert torch.equal(codes.cpu(), expected_codes)
    assert torch.equal(scales.cpu(), expected_scales)


def test_codecs_are_distinguished_by_dtype(kernel_device: torch.device) -> None:
    # e5m2 below 2^15 has float16's exponent, and was read as float16.
    other = Scaled(dtype=torch.bfloat16, exponent=15, smallest=2.0**-133, signed=True)
    with pytest.raises(LayoutError, match="backend='torch'"):
        scheme(other)
    for dtype, name in ((torch.float16, "half"), (torch.float8_e4m3fn, "e4m3"), (torch.float8_e5m2, "e5m2")):
        assert scheme(codec_for("exp_avg", dtype, signed=True)) == name


def test_a_codec_without_a_sweep_is_refused() -> None:
    with pytest.raises(LayoutError, match="backend='torch'"):
        scheme(replace(CODECS["int8"], block=64))  # type: ignore[type-var]
