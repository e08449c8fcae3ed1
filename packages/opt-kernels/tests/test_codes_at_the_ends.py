"""Codes of the smallest and largest values, and of the last elements of a tensor's memory."""

import ctypes
import mmap
import sys
from pathlib import Path

import pytest
import torch
from cpp_works import in_another_process
from test_cpp_codecs import CODECS, ON_CODECS, assert_same, no_scalars, swap
from ties import companded_ties
from torch import Tensor

from opt_kernels.backends.cpp import update as cpp
from opt_kernels.backends.cpp.compiler import usable
from opt_kernels.codecs import StateCodec, scale_name
from opt_kernels.formulas import Formula, State
from opt_kernels.works import Batch, Hyper, Work

pytestmark = pytest.mark.skipif(not usable(), reason="no C++ compiler here")


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
    script = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_codes_at_the_ends as t; t.main()"
    )
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
