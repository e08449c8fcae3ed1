"""Codecs, bf16 remainders of 16 and 8 bits and stochastic rounding: their definitions, over all bits that matter."""

import pytest
import torch
from codec_values import CODECS, EVERY_UPPER_HALF, ON_CODECS, at_ties, split
from torch import Tensor

from opt_kernels.codecs import StateCodec, codec_for, init_state, join, narrow, scale_name

pytestmark = pytest.mark.usefixtures("poisoned")
SIZES = [0, 1, 63, 127, 128, 129, 1025]
# Of numbers at least as large as the smallest normal code; below, a code has a fixed spacing, of which half is lost.
ERRORS = {"fp16": (2.0**-11, 2.0**-24 / 2**14), "e4m3": (2.0**-4, 2.0**-9 / 2**7), "e5m2": (2.0**-3, 2.0**-9 / 2**7)}


def stored(codec: StateCodec, values: Tensor) -> dict[str, Tensor]:
    """`values` (n,) as the codec keeps them."""
    state = init_state({"x": codec}, values)
    codec.encode_(state["x"], state.get(scale_name("x")), values)
    return state


def read(codec: StateCodec, state: dict[str, Tensor]) -> Tensor:
    values = torch.full(state["x"].shape, torch.nan)
    codec.decode_(values, state["x"], state.get(scale_name("x")))
    return values


def sample(numel: int, *, signed: bool) -> Tensor:
    """Numbers over some six decades, some of them zero."""
    noise = torch.randn(3, numel, generator=torch.Generator().manual_seed(numel))
    x = noise[0] * torch.exp(3 * noise[1]) * (noise[2] > -1)
    return x if signed else x.square()


def largest_of_block(values: Tensor) -> Tensor:
    return torch.cat([part.abs().max().expand_as(part) for part in torch.split(values, 128) if part.numel()])


@pytest.mark.parametrize("name", ["fp32", "bf16", *ERRORS])
def test_a_float_code_is_the_number_rounded(name: str) -> None:
    plain = {"fp32": (torch.float32, 0.0), "bf16": (torch.bfloat16, 2.0**-8)}
    codec = codec_for("x", plain[name][0], signed=True) if name in plain else CODECS[f"{name}-signed"][0]
    relative, floor = ERRORS.get(name, (plain.get(name, (None, 0.0))[1], 0.0))
    for numel in SIZES:
        x = sample(numel, signed=True)
        allowed = relative * x.abs()
        if codec.block and numel:
            allowed = torch.maximum(allowed, largest_of_block(x) * floor / 2)
        assert ((read(codec, stored(codec, x)) - x).abs() <= allowed).all(), numel


@pytest.mark.parametrize("numel", SIZES[1:])
def test_8_bit_means_are_dense_near_zero_and_squares_are_roots(numel: int) -> None:
    x = sample(numel, signed=True)
    (codec, _) = CODECS["8-bit-signed"]
    n = x / largest_of_block(x)
    back = read(codec, stored(codec, x)) / largest_of_block(x)
    # y = 2n / (1 + |n|) is rounded to half of 1/127; dn/dy = (1 + |n|)^2 / 2, at most 2, and 1/2 at zero.
    slope = (1 + torch.maximum(n.abs(), back.abs())).square() / 2
    assert ((back - n).abs() <= slope * (0.5 / 127) + 1e-6).all()
    x = sample(numel, signed=False)
    (codec, _) = CODECS["8-bit-square"]
    largest = largest_of_block(x).sqrt()
    root = x.sqrt() / largest
    back = read(codec, stored(codec, x)).sqrt() / largest
    lifted = (x > 0) & (root < 0.5 / 255)
    assert ((back - root).abs()[~lifted] <= 0.5 / 255 + 1e-6).all()
    assert torch.allclose(back[lifted], torch.tensor(1 / 255), rtol=1e-5)


@ON_CODECS
def test_only_zeros_are_stored_as_zeros_in_blocks_of_any_size(codec: StateCodec, signed: bool) -> None:
    for numel in SIZES:
        assert not read(codec, stored(codec, torch.zeros(numel))).any()
        values = sample(numel, signed=signed)
        assert not read(codec, stored(codec, values))[values == 0].any()
    assert signed or (read(codec, stored(codec, torch.logspace(-30, 0, 256))) > 0).all()
    if not signed and codec.dtype.is_floating_point:  # the smallest number that the dtype has
        codes = stored(codec, torch.tensor([1.0, 1e-30]))["x"]
        dtype = torch.finfo(codec.dtype)
        assert codes[1].item() == dtype.tiny * dtype.eps
    for size in (1e-45, 1e-38, 1e-30, 1e30, 2.9e38):  # e5m2 rounds the root of 3e38 up to 2^64
        back = read(codec, stored(codec, torch.full((128,), size)))
        assert back.isfinite().all(), size
        assert size < 1e-30 or torch.allclose(back, torch.tensor(size), rtol=2.0**-3), size
    for bad in (torch.inf, torch.nan):  # spoils its block and no other
        x = torch.rand(384) + 0.5
        x[130] = bad
        assert read(codec, stored(codec, x)).isnan().nonzero().flatten().tolist() == [*range(128, 256)]


@ON_CODECS
def test_states_survive_a_checkpoint_bit_for_bit(codec: StateCodec, signed: bool) -> None:
    """A checkpoint holds decoded values, which are encoded again when it is loaded."""
    # A largest value that was rounded up to a power of two doubled the scale, and small values lost a bit.
    largest = 2 - torch.arange(512)[:, None] * 2.0**-10
    noise = torch.rand(512, 127, generator=torch.Generator().manual_seed(0))
    x = (largest * torch.cat([torch.ones(512, 1), 2.0 ** (-16 * noise)], 1)).flatten()
    first = stored(codec, x if signed else x.square())
    again = stored(codec, read(codec, first))
    assert all(torch.equal(value.float(), again[name].float()) for name, value in first.items())


def test_the_16_bit_remainder_loses_nothing_and_keeps_nan() -> None:
    main = EVERY_UPPER_HALF
    nan = EVERY_UPPER_HALF.isnan()
    weight, rest = split(main, torch.int16)
    back = join(weight, rest)
    assert torch.equal(back.view(torch.int32)[~nan], main.view(torch.int32)[~nan])
    assert back[nan].isnan().all()
    assert weight[nan].isnan().all(), "a NaN of the main is hidden from the model"
    # The weight is the main rounded, ties away from zero.
    word = main.view(torch.int32)
    tie = (word & 0xFFFF) == 0x8000
    assert torch.equal(weight[~tie & ~nan].view(torch.int16), main[~tie & ~nan].bfloat16().view(torch.int16))
    upper = ((word[tie & ~nan] >> 16) + 1 + 0x8000 & 0xFFFF) - 0x8000
    assert torch.equal(weight[tie & ~nan].view(torch.int16).to(torch.int32), upper)


def test_the_8_bit_remainder_keeps_24_bits() -> None:
    main = at_ties(count=200_000)
    word = main.view(torch.int32)
    want = (word + 0x7F + (word >> 8 & 1) & ~0xFF).view(torch.float32)  # to nearest, ties to even
    want[main.isnan()] = torch.nan
    weight, bits = split(main, torch.int8)
    value = join(weight, bits)
    torch.testing.assert_close(value, want, rtol=0, atol=0, equal_nan=True)
    again, bits_again = split(value, torch.int8)
    assert torch.equal(again.view(torch.int16), weight.view(torch.int16))
    assert torch.equal(bits_again, bits)
    keeps = weight.isfinite() & main.isfinite()  # the weight is the nearest bfloat16 number
    off = (weight.float() - value)[keeps].abs()
    unit = torch.frexp(weight[keeps].float())[1] - 8
    assert (off <= torch.ldexp(torch.tensor(0.5), unit.clamp(min=-133))).all()
    weight, bits = split(torch.tensor([torch.inf, -torch.inf, torch.nan, -torch.nan]), torch.int8)
    assert weight[:2].tolist() == [torch.inf, -torch.inf]
    assert not bits.any()
    payload = torch.tensor([0x7FFFFFFF, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    assert torch.cat([weight[2:], split(payload, torch.int8)[0]]).isnan().all()


def test_stochastic_rounding_is_unbiased_and_casts_nonfinite() -> None:
    def rounded(x: Tensor) -> Tensor:
        found = torch.empty_like(x, dtype=torch.bfloat16)
        narrow.round_(found, x, narrow.noise(x.numel(), first=0, step=1, device=x.device))
        return found

    numel = 1 << 16
    fraction = 0x3000 / 0x10000
    found = rounded(torch.full((numel,), 1.0) + fraction * 2.0**-7)
    assert set(found.tolist()) == {1.0, 1.0078125}
    # Four standard deviations of the binomial share.
    assert abs((found > 1).double().mean() - fraction) < 4 * (fraction * (1 - fraction) / numel) ** 0.5
    infinite = rounded(torch.tensor([torch.inf, -torch.inf, torch.nan]))
    assert infinite[:2].tolist() == [torch.inf, -torch.inf]
    assert infinite[2].isnan()


def test_the_noise_of_neighbours_and_of_steps_is_unrelated() -> None:
    draws = [narrow.noise(1 << 14, first=f, step=s, device=torch.device("cpu")) for f, s in ((0, 1), (1, 1), (0, 2))]
    centred = torch.stack([narrow.upper_bits(draw, 16) for draw in draws]).double() - 32767.5
    # Of independent draws: 1 / sqrt(2^14), four times.
    assert (torch.corrcoef(centred) - torch.eye(3)).abs().max() < 4 / 128
    assert centred.mean().abs() < 4 * 18919 / (3 * 2**14) ** 0.5


def test_states_have_noise_unrelated_by_step_and_number() -> None:
    def words(step: int, number: int) -> Tensor:
        place = {"first": 0, "step": step, "device": torch.device("cpu")}
        return narrow.noise_of_state(1 << 17, **place, number=number, period=narrow.NOISE_BLOCK)

    # One word of each block: those between are multiples of the golden ratio from it.
    draws = [words(*which)[5 :: narrow.NOISE_BLOCK] for which in ((1, 1), (2, 1), (1, 2), (2, 2))]
    centred = torch.stack([narrow.upper_bits(draw, 16) for draw in draws]).double() - 32767.5
    assert (torch.corrcoef(centred) - torch.eye(4)).abs().max() < 4 / 1024**0.5
    spread = narrow.upper_bits(words(3, 1), 20).double() / 2**20
    assert abs(spread.mean() - 0.5) < 4 * (1 / 12 / 1024) ** 0.5


@pytest.mark.parametrize("word", [0, -1, 0x7FFF0000, -0x7FFF0000])
@pytest.mark.parametrize("name", ["8-bit-signed", "8-bit-square"])
def test_an_8_bit_number_is_given_its_code_again_by_any_noise(name: str, word: int) -> None:
    """Though the product of its factors is not the code, but a few units off."""
    (codec, signed) = CODECS[name]
    codes = torch.arange(-126.0, 128.0) if signed else torch.arange(2.0, 256.0)
    block = torch.cat([codes[:127], codes[-1:], codes[127:], codes[-1:]])  # two blocks with one scale
    shares = block / (254 - block.abs()) if signed else block
    scales = torch.rand(400, 1, generator=torch.Generator().manual_seed(word)).add_(1.0)
    values = (scales * shares / 256).view(-1)
    first = stored(codec, values if signed else values.square())
    decoded = read(codec, first)
    again = init_state({"x": codec}, decoded)
    words = torch.full(decoded.shape, word, dtype=torch.int32)
    codec.encode_(again["x"], again[scale_name("x")], decoded, words)
    assert torch.equal(again["x"], first["x"])


def test_the_largest_float64_of_a_block_gets_the_largest_code() -> None:
    """By any noise, though the scale is rounded to float32: a code beyond the largest would wrap around to zero."""
    (codec, _) = CODECS["8-bit-square"]
    values = torch.linspace(1.0, 1.05, 20_000, dtype=torch.float64).repeat_interleave(128)
    state = init_state({"x": codec}, values)
    codec.encode_(state["x"], state[scale_name("x")], values, torch.full(values.shape, -1, dtype=torch.int32))
    assert (state["x"] == 255).all()


@pytest.mark.parametrize(("codec", "signed"), CODECS.values(), ids=CODECS.keys())
def test_a_state_rounded_stochastically_is_right_on_average(codec: StateCodec, signed: bool) -> None:
    """Of what is stored, which is the root for states that are never negative; subnormal codes included."""
    size = torch.tensor([1.0, 0.71, 0.3333, 0.1, 0.012, 3e-4, 3e-6]).repeat_interleave(1 << 12)
    stored = size.view(7, -1).T.reshape(-1)  # every block has the largest one
    values = stored if signed else stored.square()
    state = init_state({"x": codec}, values)
    place = {"first": 0, "step": 1, "device": values.device}
    words = narrow.noise_of_state(len(values), **place, number=1, period=codec.noise_period)
    codec.encode_(state["x"], state[scale_name("x")], values, words)
    found = torch.empty_like(values)
    codec.decode_(found, state["x"], state[scale_name("x")])
    found = found if signed else found.sqrt()
    smallest = found[found > 0].min()
    for exact in stored.unique():
        of_size = found[stored == exact].double()
        # No positive root is stored as zero; four standard deviations of a mean of values at most a code apart.
        if signed or exact > smallest:
            assert abs(of_size.mean() - exact) <= 4 * of_size.std() / 2**6 + 1e-6 * exact, float(exact)
        assert len(of_size.unique()) <= 2
