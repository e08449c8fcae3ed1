"""The 8-bit remainder: 24 bits of a float32 number in a bf16 weight and an int8, against its definition."""

import struct

import pytest
import torch
from torch import Tensor

from opt_kernels.backends.cpp.compiler import usable
from opt_kernels.backends.elements import LayoutError
from opt_kernels.codecs.narrow import join, split_
from opt_kernels.rules import SGD
from opt_kernels.works import Batch, Hyper, Work

SPECIAL = [0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf, 1e-45, -1e-40, 3.4028235e38, -3.4028235e38, 1.1754944e-38]
INF_WORD = 0x7F800000


def words(*, count: int = 200_000) -> Tensor:
    """float32 numbers of every exponent, among them ties of both roundings."""
    generator = torch.Generator().manual_seed(0)
    word = torch.randint(-(2**31), 2**31, (count,), generator=generator)
    ties = word.clone()
    ties[::2] = (ties[::2] & ~0xFF) | 0x80
    ties[::3] = (ties[::3] & ~0xFFFF) | 0x8000
    found = torch.cat([word, ties]).to(torch.int32).view(torch.float32)
    return torch.cat([found, torch.tensor(SPECIAL)])


def split(main: Tensor) -> tuple[Tensor, Tensor]:
    weight, bits = torch.empty_like(main, dtype=torch.bfloat16), torch.empty_like(main, dtype=torch.int8)
    split_(weight, bits, main)
    return weight, bits


def expected(value: float) -> float:
    """`value` to nearest even in 24 bits, with integers of Python."""
    (word,) = struct.unpack("<I", struct.pack("<f", value))
    sign, magnitude = word >> 31, word & 0x7FFFFFFF
    if magnitude > INF_WORD:
        return float("nan")
    low, upper = magnitude & 0xFF, magnitude >> 8
    upper += low > 0x80 or (low == 0x80 and upper % 2)
    return struct.unpack("<f", struct.pack("<I", sign << 31 | upper << 8))[0]


def test_joined_values_are_those_rounded_to_24_bits() -> None:
    main = words(count=5000)
    want = torch.tensor([expected(value) for value in main.tolist()])
    assert torch.equal(join(*split(main)).nan_to_num(nan=7.0), want.nan_to_num(nan=7.0))


def test_values_are_split_into_the_bits_that_they_were_joined_from() -> None:
    weight, bits = split(words())
    again, bits_again = split(join(weight, bits))
    assert torch.equal(again.view(torch.int16), weight.view(torch.int16))
    assert torch.equal(bits_again, bits)


def test_the_weight_is_the_main_value_to_nearest() -> None:
    main = words()
    weight, bits = split(main)
    value = join(weight, bits)
    keeps = weight.isfinite() & main.isfinite()
    off, unit = (weight.float() - value)[keeps].abs(), torch.frexp(weight[keeps].float())[1] - 8
    assert (off <= torch.ldexp(torch.tensor(0.5), unit.clamp(min=-133))).all()


def test_nan_and_infinity_stay_in_the_weight() -> None:
    weight, bits = split(torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf]))
    assert weight.isnan().tolist() == [True, True, False, False]
    assert weight[2:].tolist() == [torch.inf, -torch.inf]
    assert not bits.any()
    payload = torch.tensor([0x7FFFFFFF, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    assert split(payload)[0].isnan().all()


@pytest.mark.parametrize("shape", [(0,), (3, 0), (), (5, 7)], ids=str)
def test_any_shape_and_order_of_dimensions(shape: tuple[int, ...]) -> None:
    main = torch.randn(shape)
    flat = join(*split(main.reshape(-1))).view(shape)
    assert torch.equal(join(*split(main)), flat)
    if main.dim() == 2:
        weight = torch.empty(shape[::-1], dtype=torch.bfloat16).t()
        bits = torch.empty(shape, dtype=torch.int8)
        split_(weight, bits, main)
        assert torch.equal(join(weight, bits), flat)


BACKENDS = ["reference", "torch", pytest.param("cpp", marks=pytest.mark.skipif(not usable(), reason="no C++ compiler"))]


@pytest.mark.parametrize("backend", [*BACKENDS, "triton"])
@pytest.mark.parametrize("is_finite", [True, False], ids=["finite", "with NaN"])
def test_sweeps_store_the_bits_of_the_definition(backend: str, is_finite: bool) -> None:
    """Of new values of every exponent, among them ties: 0 - 1 * (-value)."""
    if backend == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
    values = words(count=20_000)
    values = values[values.isfinite()] if is_finite else values
    out, rest = split(torch.zeros_like(values))
    work = Work(grad=-values, main=None, out=out, remainder=rest, state={})
    rule = SGD(backend=backend, momentum_buffer=False)
    rule.update_([Batch(Hyper(lr=1.0, weight_decay=0.0, momentum=0.0), [work])])
    weight, bits = split(values + 0.0)  # 0 - 0 is +0
    assert torch.equal(out.view(torch.int16), weight.view(torch.int16))
    assert torch.equal(rest, bits)


@pytest.mark.parametrize("backend", [*BACKENDS, "triton"])
def test_a_work_may_have_either_remainder_but_no_such_main(backend: str) -> None:
    """Both in one call; and int8 values are no main, though they have its place in the tables of sweeps."""
    if backend == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
    rule, hyper = SGD(backend=backend, momentum_buffer=False), Hyper(lr=0.5, weight_decay=0.0, momentum=0.0)
    works = [
        Work(
            grad=torch.full((70,), -2.0), main=None, state={},
            out=torch.zeros(70, dtype=torch.bfloat16), remainder=torch.zeros(70, dtype=dtype),
        )
        for dtype in (torch.int8, torch.int16)
    ]  # fmt: skip
    rule.update_([Batch(hyper, works)])
    assert all(torch.equal(work.out, torch.ones(70, dtype=torch.bfloat16)) for work in works if work.out is not None)
    if backend == "triton":
        wrong = Work(grad=torch.ones(70), main=torch.zeros(70, dtype=torch.int8), out=works[0].out, state={})
        with pytest.raises(LayoutError, match=r"cannot sweep torch\.int8"):
            rule.update_([Batch(hyper, [wrong])])
