"""Triton sweeps: where they may read and write, and what they promise. Their numbers are tested with all backends'."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from elementwise_works import HYPER, shifted, work_of, written

from opt_kernels.backends import grad_stats
from opt_kernels.backends.elements import LayoutError
from opt_kernels.backends.triton.formats import LaunchFormats
from opt_kernels.backends.triton.launches import _constants, sweeps
from opt_kernels.backends.triton.quantize import scheme
from opt_kernels.codecs import Plain, Scaled
from opt_kernels.rules import SGD, Adam, ElementwiseRule, Lion
from opt_kernels.works import Batch, Work

pytestmark = pytest.mark.needs_extra

NUMEL = 1025
OF_LION = {"exp_avg": Plain()}


@pytest.mark.parametrize("make", [Adam, SGD, Lion])
def test_runs_without_alignment_give_the_same_bits(make: Callable[..., ElementwiseRule]) -> None:
    rule = make(backend="triton")
    for name in ("fp32", "fp32-out16", "remainder-g16"):
        aligned = work_of(rule, NUMEL, name, "triton")
        unaligned = shifted(work_of(rule, NUMEL, name, "triton"))
        for work in (aligned, unaligned):
            rule.update_([Batch(HYPER, [work])], grad_scale=0.5)
        assert all(map(torch.equal, written(aligned), written(unaligned))), name


def test_vector_accesses_are_promised_for_aligned_runs_alone() -> None:
    # The interpreter reads from any address; a GPU faults.
    work = work_of(Lion(), NUMEL, "fp32", "triton")
    others = [replace(shifted(work), grad=work.grad), replace(work, grad=shifted(work).grad), shifted(work)]
    for given, expected in ((work, (True, 4)), *((other, (False, 1)) for other in others)):
        [found] = sweeps([Batch(HYPER, [given])], OF_LION)
        assert (found.formats.aligned, found.formats.vector) == expected


@pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16], ids=str)
def test_promised_bits_allow_no_contraction_or_approximation(grad: torch.dtype) -> None:
    """The bits of CPUs are promised from 18 bytes an element on. Triton's own default of fusion varies by version."""
    for main in (torch.float32, torch.bfloat16):
        for states in [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.int8, torch.uint8)]:
            formats = LaunchFormats(grad, main, None, states, True)
            moved = grad.itemsize + 2 * main.itemsize + 2 * sum(state.itemsize for state in states)
            assert formats.bytes_moved == moved
            options = _constants(formats)
            assert (options["IEEE"], options["enable_fp_fusion"]) == ((moved >= 18), (moved < 18))
    narrow = LaunchFormats(torch.bfloat16, torch.int16, torch.bfloat16, (torch.int8, torch.uint8), True, remainder=True)
    assert (narrow.bytes_moved, narrow.ieee) == (14, False)


def test_a_tensor_of_another_dtype_at_the_same_address_is_seen(kernel_device: torch.device) -> None:
    memory, grad = (torch.ones(numel, device=kernel_device) for numel in (256, 128))
    for dtype in (torch.float32, torch.bfloat16):
        main = memory.view(dtype)[:128]
        work = Work(grad=grad, main=main, state={"exp_avg": torch.zeros(128, device=kernel_device)})
        memory[64:] = 1.0
        Lion(backend="triton").update_([Batch(replace(HYPER, lr=0.5, weight_decay=0.0), [work])])
    assert memory[64:].tolist() == [1.0] * 192
    assert main.tolist() != [1.0] * 128


def test_dtypes_and_codecs_kernels_would_misread_are_refused(kernel_device: torch.device) -> None:
    ones = torch.ones(300, device=kernel_device)
    fp8 = (torch.float8_e4m3fn, torch.float8_e5m2)
    cases = [(dtype, column) for dtype in (torch.float64, *fp8) for column in ("grad", "main", "out")]
    for dtype, column in (*cases, (torch.int8, "main")):  # a remainder has the place of a main
        tensors = {"grad": ones, "main": ones.clone(), column: ones.to(dtype)}
        with pytest.raises(LayoutError, match=r"cannot sweep torch.*backend='torch'"):
            Lion(backend="triton").update_([Batch(HYPER, [Work(state=Lion().init_state(ones), **tensors)])])
    for dtype in (torch.float64, *fp8):
        with pytest.raises(LayoutError, match="cannot sweep torch"):
            grad_stats([ones.to(dtype)], backend="triton")
    for codec in (Scaled(dtype=torch.bfloat16), *(Plain(dtype=dtype) for dtype in fp8)):
        with pytest.raises(LayoutError, match="backend='torch'"):
            scheme(codec)
