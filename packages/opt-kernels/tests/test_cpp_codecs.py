"""Codecs as compiled sweeps read and write them: code by code against the reference, up to the ends of values and of
memory, for several processors."""

import ctypes
import mmap
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cpp_works import in_another_process
from ties import companded_ties
from torch import Tensor

from opt_kernels.backends import reference
from opt_kernels.backends.cpp import update as cpp
from opt_kernels.backends.cpp.compiler import usable
from opt_kernels.codecs import StateCodec, codec_for, init_state, scale_name
from opt_kernels.formulas import Formula, State
from opt_kernels.works import Batch, Hyper, Work

DTYPES = {
    "fp16": (torch.float16, torch.float16),
    "e4m3": (torch.float8_e4m3fn, torch.float8_e4m3fn),
    "e5m2": (torch.float8_e5m2, torch.float8_e5m2),
    "8-bit": (torch.int8, torch.uint8),
}
CODECS = {
    f"{name}-{'signed' if signed else 'square'}": (codec_for("x", dtypes[0 if signed else 1], signed=signed), signed)
    for name, dtypes in DTYPES.items()
    for signed in (True, False)
}
ON_CODECS = pytest.mark.parametrize(("codec", "signed"), CODECS.values(), ids=CODECS.keys())
pytestmark = pytest.mark.skipif(not usable(), reason="no C++ compiler here")


def no_scalars(*, lr: float) -> dict[str, float]:
    return {"lr": lr}


def swap(p: Any, g: Any, x: Any, *, lr: Any) -> Any:
    """Reads the state into the main, and writes the gradient to the state."""
    return x, g


def swapped(
    run: Callable[..., None], codec: StateCodec, signed: bool, values: Tensor, state: dict[str, Tensor]
) -> Work:
    formula = Formula(name="swap", states=(State(name="x", signed=signed),), scalars=no_scalars, update=swap)
    kept = {name: tensor.clone() for name, tensor in state.items()}
    work = Work(grad=values.clone(), main=torch.zeros_like(values), state=kept)
    run([Batch(Hyper(lr=0.1), [work])], formula, {"x": codec})
    return work


def assert_same(codec: StateCodec, signed: bool, values: Tensor, state: dict[str, Tensor] | None = None) -> None:
    """The compiled sweep decodes `state` and encodes `values` as the reference does."""
    state = init_state({"x": codec}, values) if state is None else state
    found, expected = (swapped(run, codec, signed, values, state) for run in (cpp.update_, reference.update_))
    assert found.main is not None
    assert expected.main is not None
    assert torch.equal(found.main.view(torch.int32), expected.main.view(torch.int32))
    codes = [
        work.state["x"].view(torch.int16 if codec.dtype is torch.float16 else torch.uint8) for work in (found, expected)
    ]
    different = (codes[0] != codes[1]).nonzero().flatten()[:4]
    assert not different.numel(), f"codes of {values[different].tolist()} differ"
    scales = [work.state[scale_name("x")] for work in (found, expected)]
    assert torch.equal(scales[0].nan_to_num(-1.0), scales[1].nan_to_num(-1.0))


@ON_CODECS
@pytest.mark.parametrize("scale", [1.0, 0.3, 2.0**-126, 2.0**100, 2.0**120])
def test_every_code_is_read_as_the_reference_reads_it(codec: StateCodec, signed: bool, scale: float) -> None:
    if codec.dtype is torch.float16:
        codes = torch.arange(1 << 16).to(torch.int16).view(torch.float16)
    else:
        codes = torch.arange(256).to(torch.uint8).view(codec.dtype)
    # Codes that no value has: not finite, negative where a state never is, and -128.
    codes = codes[codes.float().isfinite() & (signed | (codes.float() >= 0)) & (codes.float() > -128)]
    codes = codes.view(torch.uint8)[: codes.numel()].view(codec.dtype) if codec.dtype.itemsize == 1 else codes
    state = {"x": codes, scale_name("x"): torch.full((-(-codes.numel() // codec.block),), scale)}
    assert_same(codec, signed, torch.zeros(codes.numel()), state)


@ON_CODECS
@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-25, 1e-12, 1.0, 7e7, 1e25, 3e38])
def test_values_of_any_size_are_written_as_the_reference_writes_them(
    codec: StateCodec, signed: bool, size: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(128 * 40 + 37, generator=generator) * 10 ** (-6 * torch.rand(128 * 40 + 37, generator=generator))
    x[::7] = 0.0
    x = x * size
    if signed:
        x[1::2] *= -1
    x[0] = -0.0
    assert_same(codec, signed, x)


@ON_CODECS
def test_values_near_ties_are_written_as_the_reference_writes_them(codec: StateCodec, signed: bool) -> None:
    # In each group of 128: a largest value, then values half way between two codes, and their neighbours.
    halves = torch.arange(255 * 4).double().add(0.5) / (255 * 4)
    ties = [halves / (2 - halves), halves, halves.square(), torch.ldexp(torch.arange(1, 33).double(), torch.tensor(-5))]
    exact = torch.cat(ties).float()
    near = torch.cat(
        [exact, exact.nextafter(torch.tensor(1.0)), exact.nextafter(torch.tensor(0.0)), exact * (1 + 1e-6)]
    )
    groups = torch.nn.functional.pad(near, (0, -near.numel() % 127)).view(-1, 127)
    x = torch.cat([torch.ones(groups.shape[0], 1), groups], 1).flatten()
    for scale in (1.0, 0.7, 1e-6):
        assert_same(codec, signed, x * scale if signed else (x * scale).square())
        assert_same(codec, signed, -x * scale if signed else x * scale)


@ON_CODECS
def test_single_values_near_ties_are_written_as_the_reference_writes_them(codec: StateCodec, signed: bool) -> None:
    # Groups of 128 with zeros, a largest value, and one value in 32 within a few units of a tie. A sweep that decides
    # for many elements at a time whether to round exactly must see each of them.
    generator = torch.Generator().manual_seed(0)
    groups = 8192
    largest = 127 if signed else 255
    tie = (largest - 0.5 - torch.randint(60, (groups, 4), generator=generator)) / (2 * largest if signed else largest)
    share = tie / (1 - tie) if signed else tie
    units = torch.randint(-3, 4, (groups, 4), generator=generator)
    x = torch.zeros(groups, 128)
    x[:, 0] = torch.rand(groups, generator=generator) + 0.5
    x[:, 1::32] = x[:, :1] * share * (1 + units * 2.0**-24)
    assert_same(codec, signed, (x if signed else x.double().square().float()).flatten())


@ON_CODECS
@pytest.mark.parametrize("numel", [1, 127, 128, 129, 300])
@pytest.mark.parametrize("special", [None, torch.nan, torch.inf])
def test_short_and_lost_groups_are_written_as_the_reference_writes_them(
    codec: StateCodec, signed: bool, numel: int, special: float | None
) -> None:
    x = torch.linspace(0, 1, numel)
    if special is not None:
        x[numel // 2] = special
    assert_same(codec, signed, x)


@pytest.mark.parametrize("exponent", [-126, -125, -123, -100, -1, 0, 126, 127])
def test_ties_below_a_scale_of_any_size_are_rounded_as_the_reference_rounds_them(exponent: int) -> None:
    # Half of a scale below 2^-125 loses its last bit; one value in thirty next to a tie then had another code.
    codec, signed = CODECS["8-bit-signed"]
    assert_same(codec, signed, companded_ties(exponent, num_groups=256))


@ON_CODECS
@pytest.mark.parametrize("numel", [1, 31, 33, 100, 128, 300])
def test_negative_zeros_are_written_as_the_reference_writes_them(codec: StateCodec, signed: bool, numel: int) -> None:
    # A group without other values lost the signs of its zeros, except at its end.
    zeros = -torch.zeros(numel)
    assert_same(codec, signed, zeros)
    zeros[::3] = 0.0
    assert_same(codec, signed, zeros)


def at_the_end_of_memory(numel: int, dtype: torch.dtype) -> Tensor:
    """Zeros that end where a page begins that may not be read."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    page, num_bytes = mmap.PAGESIZE, numel * dtype.itemsize
    size = -(-num_bytes // page) * page
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    whole = libc.mmap(None, ctypes.c_size_t(size + page), mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    assert libc.mprotect(ctypes.c_void_p(whole + size), ctypes.c_size_t(page), 0) == 0
    return torch.frombuffer((ctypes.c_char * num_bytes).from_address(whole + size - num_bytes), dtype=dtype)


def sweep_at_the_end(numel: int, codec: StateCodec, signed: bool) -> None:
    formula = Formula(name="swap", states=(State(name="x", signed=signed),), scalars=no_scalars, update=swap)
    tensors = [at_the_end_of_memory(numel, dtype) for dtype in (torch.float32, torch.float32, codec.dtype)]
    scales = at_the_end_of_memory(-(-numel // 128), torch.float32)
    work = Work(grad=tensors[0], main=tensors[1], state={"x": tensors[2], scale_name("x"): scales})
    cpp.update_([Batch(Hyper(lr=0.1), [work])], formula, {"x": codec})


def main() -> None:
    for numel in (1, 40, 65, 100, 127, 128, 228, 4196):
        for codec, signed in CODECS.values():
            sweep_at_the_end(numel, codec, signed)


@pytest.mark.skipif(sys.platform != "linux", reason="protects memory by functions of Linux")
def test_no_sweep_reads_beyond_the_end_of_a_tensor() -> None:
    # A last group of 65 to 127 elements was decoded as one of 128: 512 bytes too far, into memory that may not exist.
    script = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_cpp_codecs as t; t.main()"
    finished = in_another_process(script)
    assert finished.returncode == 0, finished.stderr[-2000:]


@ON_CODECS
def test_states_survive_a_checkpoint_bit_for_bit(codec: StateCodec, signed: bool) -> None:
    """A checkpoint holds decoded values, which are encoded again when it is loaded."""
    # A largest value that was rounded up to a power of two doubled the scale, and small values lost a bit.
    generator = torch.Generator().manual_seed(0)
    largest = 2 - torch.arange(512)[:, None] * 2.0**-10
    x = largest * torch.cat([torch.ones(512, 1), 2.0 ** (-16 * torch.rand(512, 127, generator=generator))], 1)
    x = x.flatten() if signed else x.flatten().square()
    first, second = (
        [torch.empty(x.numel(), dtype=codec.dtype), torch.empty(512), torch.empty(x.numel())] for _ in range(2)
    )
    for values, (codes, scales, decoded) in ((x, first), (first[2], second)):
        codec.encode_(codes, scales, values)
        codec.decode_(decoded, codes, scales)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(first, second))


X86 = platform.machine() in ("x86_64", "AMD64")
FLAGS = Path("/proc/cpuinfo").read_text().split() if X86 and Path("/proc/cpuinfo").exists() else []
PROCESSORS = {"x86-64": "sse2", "x86-64-v3": "avx2", "x86-64-v4": "avx512vl"}


@pytest.mark.parametrize("processor", PROCESSORS)
def test_older_processors_have_the_same_bits(processor: str, tmp_path: Path) -> None:
    if PROCESSORS[processor] not in FLAGS:
        pytest.skip(f"this processor does not run code for {processor}")
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\nexec c++ "$@" -march={processor}\n')
    compiler.chmod(0o700)
    environment = os.environ | {"CXX": str(compiler), "OPT_KERNELS_CACHE": str(tmp_path / "cache")}
    names = "every_code or any_size or ties or (lost and nan and 129) or adamw-fp32-fp32"
    files = [Path(__file__), Path(__file__).with_name("test_formulas.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-k", names, *map(str, files)]
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert finished.returncode == 0, finished.stdout[-3000:]
    assert " passed" in finished.stdout
