"""Codecs, remainders and rounding as compiled sweeps read and write them: with the bits of the reference.

Code by code, up to the ends of values and of memory, for several processors.
"""

import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from codec_values import CODECS, EVERY_UPPER_HALF, ON_CODECS, at_ties, near_ties, single_ties, split
from elementwise_works import COMPILED, NEEDS_COMPILER, ON_FAST, in_another_process, main_of, on, only_lr
from tiers import NIGHT
from torch import Tensor

from opt_kernels.backends.dispatch import version
from opt_kernels.codecs import StateCodec, codec_for, init_state, narrow, scale_name
from opt_kernels.formulas import Formula, State
from opt_kernels.rules import SGD
from opt_kernels.works import Batch, Hyper, Work

ALL = on("reference", "torch", "cpp", "triton")
CPU = torch.device("cpu")
HYPER = Hyper(lr=1.0, weight_decay=0.0, momentum=0.0)


def swap(p: Any, g: Any, x: Any, *, lr: Any) -> Any:
    """Reads the state into the main, and writes the gradient to the state."""
    return x, g


def swapped(
    codec: StateCodec, signed: bool, values: Tensor, state: Mapping[str, Tensor], backend: str, *, at: tuple[int, int]
) -> Work:
    first, step = at
    formula = Formula(name="swap", states=(State(name="x", signed=signed),), scalars=only_lr, update=swap)
    kept = {name: tensor.to(values.device, copy=True) for name, tensor in state.items()}
    work = Work(grad=values.clone(), main=torch.zeros_like(values), state=kept, first=first)
    run = version("update", "update_", backend=backend, tensors=[values])
    run([Batch(Hyper(lr=0.1, step=step), [work])], formula, {"x": codec})
    return replace(work, state={name: tensor.cpu() for name, tensor in kept.items()})


def bits(tensor: Tensor) -> Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


def check(
    codec: StateCodec,
    signed: bool,
    values: Tensor,
    backend: str,
    device: torch.device,
    case: object,
    state: Any = None,
    at: tuple[int, int] = (0, 1),  # number of the first element, and step
) -> None:
    """The sweep decodes `state` and encodes `values` as the reference does."""
    state = init_state({"x": codec}, values) if state is None else state
    found = swapped(codec, signed, values.to(device), state, backend, at=at)
    expected = swapped(codec, signed, values, state, "reference", at=at)
    assert torch.equal(bits(main_of(found)), bits(main_of(expected))), case
    different = (bits(found.state["x"]) != bits(expected.state["x"])).nonzero().flatten()
    if backend == "triton" and not signed:  # it approximates roots: a code in a thousand may be another one, by one
        assert different.numel() <= 2 + values.numel() // 1000, case
        codes = [bits(work.state["x"])[different].int() for work in (found, expected)]
        assert ((codes[0] - codes[1]).abs() <= 1).all(), case
    else:
        assert not different.numel(), f"{case}: codes of {values[different[:4]].tolist()} differ"
    scales = [work.state.get(scale_name("x"), torch.ones(1)).nan_to_num(-1.0) for work in (found, expected)]
    torch.testing.assert_close(*scales, rtol=2**-22 if backend == "triton" and not signed else 0, atol=0)


@on("triton")
@pytest.mark.parametrize(
    ("dtype", "smallest"), [(torch.float8_e4m3fn, 2.0**-9), (torch.float8_e5m2, 2.0**-16)], ids=str
)
def test_subnormal_fp8_codes_are_read_exactly(
    dtype: torch.dtype, smallest: float, backend: str, device: torch.device
) -> None:
    # They pass through float32 subnormals, which a compiler may flush to zero. `kernels/gpu_all.py` runs this first.
    codes = torch.arange(1, 8 if dtype is torch.float8_e4m3fn else 4)
    state = {"x": codes.to(torch.uint8).view(dtype), scale_name("x"): torch.ones(1)}
    found = swapped(
        codec_for("x", dtype, signed=True), True, torch.zeros(len(codes), device=device), state, backend, at=(0, 1)
    )
    assert main_of(found).tolist() == [smallest * code for code in codes.tolist()]


@ON_CODECS
@COMPILED
def test_every_code_is_read_as_by_the_reference(
    codec: StateCodec, signed: bool, backend: str, device: torch.device
) -> None:
    if codec.dtype is torch.float16:
        codes = torch.arange(1 << 16).to(torch.int16).view(torch.float16)
    else:
        codes = torch.arange(256).to(torch.uint8).view(codec.dtype)
    # Codes that no value has: not finite, negative where a state never is, and -128.
    codes = bits(codes)[codes.float().isfinite() & (signed | (codes.float() >= 0)) & (codes.float() > -128)]
    few = backend == "triton" and codec.dtype is torch.float16 and not NIGHT  # an interpreter takes its time
    for scale in (1.0, 2.0**-126) if few else (1.0, 0.3, 2.0**-126, 2.0**100, 2.0**120):
        state = {"x": codes.view(codec.dtype), scale_name("x"): torch.full((-(-codes.numel() // codec.block),), scale)}
        check(codec, signed, torch.zeros(codes.numel()), backend, device, scale, state)


def of_size(size: float, *, signed: bool) -> Tensor:
    """Values over six decades below `size`, a seventh of them zero, the first a negative zero."""
    numel = 128 * 40 + 37
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(numel, generator=generator) * 10 ** (-6 * torch.rand(numel, generator=generator))
    x[::7] = 0.0
    x[1::2] *= -1 if signed else 1
    x[0] = -0.0
    return x * size


def short(numel: int, special: float | None = None) -> Tensor:
    x = torch.linspace(0, 1, numel)
    x[numel // 2] = x[numel // 2] if special is None else special
    return x


VALUES: dict[str, Callable[[bool], Tensor]] = {
    **{
        f"any size, {size}": (lambda signed, s=size: of_size(s, signed=signed))
        for size in (1e-44, 1e-38, 1e-25, 1e-12, 1.0, 7e7, 1e25, 3e38)
    },
    **{
        f"near ties, {scale}": (lambda signed, s=scale: near_ties() * s if signed else (near_ties() * s).square())
        for scale in (1.0, 0.7, 1e-6)
    },
    # Half of a scale below 2^-125 loses its last bit; one value in thirty next to a tie then had another code.
    **{f"near ties, 2^{power}": (lambda _, p=power: near_ties() * 0.7 * 2.0**p) for power in (-126, -124, -100, 126)},
    "near ties, negative": lambda signed: -near_ties() * 0.7 if signed else near_ties() * 0.7,
    "single ties": lambda signed: single_ties(8192, signed=signed),
    **{f"short, {numel}": (lambda _, n=numel: short(n)) for numel in (1, 127, 129, 300)},
    **{f"lost, nan of {numel}": (lambda _, n=numel: short(n, torch.nan)) for numel in (1, 128, 129)},
    **{f"lost, inf of {numel}": (lambda _, n=numel: short(n, torch.inf)) for numel in (1, 300)},
    # A group without other values lost the signs of its zeros, except at its end.
    **{f"negative zeros, {n}": (lambda _, n=n: -torch.zeros(n)) for n in (1, 31, 33, 100, 128, 300)},
    "zeros of both signs": lambda _: torch.tensor([-0.0, 0.0, -0.0]).repeat(100),
}


@ON_CODECS
@COMPILED
def test_values_are_written_as_by_the_reference(
    codec: StateCodec, signed: bool, backend: str, device: torch.device
) -> None:
    is_slow = backend == "triton" and not NIGHT
    for name, values in [*VALUES.items()][signed::2] if is_slow else VALUES.items():
        check(codec, signed, values(signed)[: 128 * 300 if backend == "triton" else None], backend, device, name)


BFLOAT16 = {f"bf16-{signed}": (codec_for("x", torch.bfloat16, signed=signed), signed) for signed in (True, False)}
STOCHASTIC = {name: (replace(codec, stochastic=True), signed) for name, (codec, signed) in (CODECS | BFLOAT16).items()}
PLACES = ((0, 1), (64, 2**20 + 17), (33, 5), (2**38 - 192, 7), (2**40 + 1, 2**31 - 1))


@pytest.mark.parametrize(("codec", "signed"), STOCHASTIC.values(), ids=STOCHASTIC.keys())
@COMPILED
def test_states_are_rounded_by_the_noise_of_the_reference(
    codec: StateCodec, signed: bool, backend: str, device: torch.device
) -> None:
    """Wherever the run begins in its parameter: within a block of noise, and beyond 2^32 blocks."""
    is_slow = backend == "triton" and not NIGHT
    names = [name for name in VALUES if name.startswith(("any", "short", "lost", "negative", "zeros"))]
    for number, name in enumerate(names[signed::3] if is_slow else names):
        values = VALUES[name](signed)
        if not codec.block and not values.isfinite().all():
            continue  # NaN payloads of bfloat16 differ
        check(codec, signed, values, backend, device, name, at=PLACES[number % len(PLACES)])
    for at in PLACES[:: 2 if is_slow else 1]:
        check(codec, signed, of_size(1.0, signed=signed), backend, device, at, at=at)


@ALL
@pytest.mark.parametrize("dtype", [*narrow.REMAINDERS, torch.bfloat16, torch.float16], ids=str)
def test_weights_and_remainders_have_the_bits_of_the_definition(
    backend: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Of new values of every exponent, among them ties: 0 - 1 * (-value), with NaN and without."""
    every = at_ties(count=20_000) if dtype is torch.int8 else EVERY_UPPER_HALF
    for values in (every,) if backend == "triton" and not NIGHT else (every, every[every.isfinite()]):
        if dtype in narrow.REMAINDERS:
            out, rest = (half.to(device) for half in split(torch.zeros_like(values), dtype))
            expected, bits_of_rest = split(values + 0.0, dtype)  # 0 - 0 is +0
            work = Work(grad=-values.to(device), main=None, out=out, remainder=rest, state={})
        else:
            out = torch.empty_like(values, dtype=dtype, device=device)
            expected = (values + 0.0).to(dtype)
            work = Work(grad=-values.to(device), main=torch.zeros_like(values, device=device), out=out, state={})
        SGD(backend=backend, momentum_buffer=False).update_([Batch(HYPER, [work])])
        out = out.cpu()
        nan = expected.isnan()
        assert out[nan].isnan().all()
        assert torch.equal(bits(out[~nan]), bits(expected[~nan]))
        if work.remainder is not None:
            assert torch.equal(work.remainder.cpu(), bits_of_rest)
            assert torch.equal(bits(out[nan]), bits(expected[nan]))


@ON_FAST
def test_stochastic_rounding_has_the_noise_of_the_reference(backend: str, device: torch.device) -> None:
    # Several chunks, at addresses that stay: a table that is found again must not have the numbers of before.
    tensors = [
        (torch.full((5000,), 2.0**-9, device=at), torch.empty(5000, device=at).bfloat16()) for at in (device, CPU)
    ]
    for first, step in product((0, 64, 2**32 - 512, 2**32, 2**40 + 192), (1, 2**20 + 17, 2**31 - 1)):
        found = []
        for name, (grad, main) in zip((backend, "reference"), tensors):
            work = Work(grad=grad, main=main.fill_(1.0), state={}, first=first)
            rule = SGD(backend=name, momentum_buffer=False, stochastic_rounding=True)
            rule.update_([Batch(replace(HYPER, step=step), [work])])
            found.append(main.cpu())
        assert torch.equal(*found), (first, step)
        assert len(found[0].unique()) == 2


def at_the_end_of_memory(numel: int, dtype: torch.dtype) -> Tensor:
    """Zeros that end where a page begins that may not be read."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    page = mmap.PAGESIZE
    num_bytes = numel * dtype.itemsize
    size = -(-num_bytes // page) * page
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    whole = libc.mmap(None, ctypes.c_size_t(size + page), mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    assert libc.mprotect(ctypes.c_void_p(whole + size), ctypes.c_size_t(page), 0) == 0
    return torch.frombuffer((ctypes.c_char * num_bytes).from_address(whole + size - num_bytes), dtype=dtype)


def main() -> None:
    for numel in (1, 40, 65, 100, 127, 128, 228, 4196):
        for codec, signed in CODECS.values():
            state = {"x": at_the_end_of_memory(numel, codec.dtype)}
            state[scale_name("x")] = at_the_end_of_memory(-(-numel // 128), torch.float32)
            formula = Formula(name="swap", states=(State(name="x", signed=signed),), scalars=only_lr, update=swap)
            grad, main = (at_the_end_of_memory(numel, torch.float32) for _ in range(2))
            run = version("update", "update_", backend="cpp", tensors=[main])
            run([Batch(Hyper(lr=0.1), [Work(grad=grad, main=main, state=state)])], formula, {"x": codec})


@NEEDS_COMPILER
@pytest.mark.skipif(sys.platform != "linux", reason="protects memory by functions of Linux")
def test_no_sweep_reads_beyond_the_end_of_a_tensor() -> None:
    # A last group of 65 to 127 elements was decoded as one of 128: 512 bytes too far, into memory that may not exist.
    here = Path(__file__)
    support = [str(here.parent), str(here.parents[3] / "integration_tests/testing")]
    finished = in_another_process(f"import sys; sys.path[:0] = {support}; import {here.stem} as tests; tests.main()")
    assert finished.returncode == 0, finished.stderr[-2000:]


FLAGS = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
PROCESSORS = {"x86-64": "sse2", "x86-64-v3": "avx2", "x86-64-v4": "avx512vl"}


@NEEDS_COMPILER
@pytest.mark.nightly
@pytest.mark.parametrize("processor", PROCESSORS)
def test_older_processors_have_the_same_bits(processor: str, tmp_path: Path) -> None:
    if PROCESSORS[processor] not in FLAGS:
        pytest.skip(f"this processor does not run code for {processor}")
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\nexec c++ "$@" -march={processor}\n')
    compiler.chmod(0o700)
    environment = os.environ | {"CXX": str(compiler), "OPT_KERNELS_CACHE": str(tmp_path / "cache")}
    parts = ("every_code", "values_are_written", "noise_of_the_reference", "remainders", "any_size", "adam-fp32-fp32")
    names = f"cpp and ({' or '.join(parts)})"
    files = [Path(__file__), Path(__file__).with_name("test_rules.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-k", names, *map(str, files)]
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert finished.returncode == 0, finished.stdout[-3000:]
    assert "skipped" not in finished.stdout
