"""The statistics sweep: sums, non-finite elements and zeros, against numpy-like float64 counts."""

import math

import pytest
import torch
from torch import Tensor

from opt_kernels.backends.cpp.compiler import usable
from opt_kernels.backends.dispatch import BackendError
from opt_kernels.backends.grad_stats import grad_stats
from opt_kernels.backends.torch_native.grad_stats import ROW_NUMEL, TILE_NUMEL

pytestmark = pytest.mark.usefixtures("poisoned")

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
NEEDS_COMPILER = pytest.mark.skipif(not usable(), reason="no C++ compiler here")
ON_BACKENDS = pytest.mark.parametrize("backend", ["reference", "torch", pytest.param("cpp", marks=NEEDS_COMPILER)])
SIZES = [0, 1, 63, 1025, ROW_NUMEL, ROW_NUMEL + 1, 65537]


def gradient(numel: int, dtype: torch.dtype) -> Tensor:
    """Noise, a third of it zero."""
    generator = torch.Generator().manual_seed(numel)
    noise = torch.randn(2, numel, generator=generator)
    return (noise[0] * (noise[1] > -0.43)).to(dtype)


@ON_BACKENDS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", SIZES)
def test_sum_and_zeros_are_those_of_float64(backend: str, dtype: torch.dtype, numel: int) -> None:
    grads = [gradient(numel, dtype), gradient(numel + 5, dtype).view(1, -1, 1)]
    before = [grad.clone() for grad in grads]
    stats = grad_stats(grads, backend=backend)
    exact = torch.cat([grad.flatten().double() for grad in grads])
    # float32 sums of rows of 2^12, hundreds of terms in a lane: some ten roundings of 2^-24, all to one side at worst.
    torch.testing.assert_close(stats.sum_of_squares, exact.square().sum(), rtol=2e-6, atol=0)
    assert stats.zeros == (exact == 0).sum()
    assert stats.nonfinite == 0
    assert all(torch.equal(a, b) for a, b in zip(grads, before))


@ON_BACKENDS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_elements_have_no_norm_and_no_zeros(backend: str, dtype: torch.dtype) -> None:
    """What a rank without rows of an FSDP2 parameter asks for."""
    for grads in ([], [torch.empty(0, dtype=dtype)], [torch.empty(0, 3, dtype=dtype), torch.empty(2, 0, dtype=dtype)]):
        stats = grad_stats(grads, backend=backend)
        assert (stats.sum_of_squares.item(), stats.nonfinite.item(), stats.zeros.item()) == (0, 0, 0)


@ON_BACKENDS
def test_dtypes_may_be_mixed_and_tiles_full(backend: str) -> None:
    grads = [gradient(numel, dtype) for dtype in DTYPES for numel in (7, TILE_NUMEL - 1, 3)]
    stats = grad_stats(grads, backend=backend)
    exact = torch.cat([grad.double() for grad in grads])
    torch.testing.assert_close(stats.sum_of_squares, exact.square().sum(), rtol=2e-6, atol=0)
    assert stats.zeros == (exact == 0).sum()


@ON_BACKENDS
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_non_finite_element_is_counted(backend: str, bad: float, dtype: torch.dtype) -> None:
    grads = [gradient(1025, dtype), gradient(40000, dtype)]
    grads[0][0] = grads[1][39999] = grads[1][5] = bad
    stats = grad_stats(grads, backend=backend)
    assert stats.nonfinite == 3
    assert not stats.sum_of_squares.isfinite()
    assert stats.zeros == sum(int((grad == 0).sum()) for grad in grads)


@ON_BACKENDS
@pytest.mark.parametrize("size", [1e-30, 1e-22, 1e19, 1e30], ids=str)
def test_squares_beyond_float32_are_neither_lost_nor_infinite(backend: str, size: float) -> None:
    grad = torch.full((1000,), size)
    stats = grad_stats([grad], backend=backend)
    exact = grad.double().square().sum()
    torch.testing.assert_close(stats.sum_of_squares, exact, rtol=1e-6, atol=0)
    assert stats.nonfinite == 0


@ON_BACKENDS
def test_zeros_are_counted_only_if_requested(backend: str) -> None:
    assert grad_stats([torch.zeros(9), torch.ones(3)], count_zeros=False, backend=backend).zeros == 0
    assert grad_stats([torch.zeros(9), torch.ones(3)], backend=backend).zeros == 9
    assert grad_stats([torch.zeros(9)], backend=backend).zeros == 9


@ON_BACKENDS
@pytest.mark.parametrize("norm_type", [1.0, 3.0, math.inf])
def test_other_norms(backend: str, norm_type: float) -> None:
    grads = [gradient(1025, torch.float32), gradient(7, torch.bfloat16)]
    flat = torch.cat([grad.double() for grad in grads]).abs()
    exact = flat.max() if norm_type == math.inf else flat.pow(norm_type).sum()
    torch.testing.assert_close(grad_stats(grads, norm_type=norm_type, backend=backend).sum_of_squares, exact)


@pytest.mark.parametrize("norm_type", [0.0, -2.0, math.nan])
def test_what_is_no_norm_is_refused(norm_type: float) -> None:
    with pytest.raises(ValueError, match=r"pass a number above 0, or math\.inf"):
        grad_stats([torch.ones(2)], norm_type=norm_type)


@ON_BACKENDS
def test_no_gradients_have_norm_zero(backend: str) -> None:
    stats = grad_stats([], backend=backend)
    assert [float(number) for number in stats] == [0, 0, 0]
    assert (stats.sum_of_squares.dtype, stats.zeros.dtype) == (torch.float64, torch.int64)


def test_statistics_of_no_elements_are_on_the_device_of_the_gradients() -> None:
    empty = torch.empty(0, dtype=torch.float16, device="meta")
    assert {number.device.type for number in grad_stats([empty], backend="torch")} == {"meta"}


def test_the_sum_has_the_same_bits_whatever_the_number_of_threads() -> None:
    grads = [gradient(300_000, torch.float32), gradient(70_000, torch.bfloat16)]
    before, sums = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        sums.append(float(grad_stats(grads).sum_of_squares))
    torch.set_num_threads(before)
    assert len(set(sums)) == 1


def test_a_strided_gradient_is_read_as_it_is() -> None:
    grad = torch.arange(12.0).view(3, 4)[:, ::2]
    torch.testing.assert_close(grad_stats([grad]).sum_of_squares, grad.double().square().sum(), rtol=1e-6, atol=0)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(BackendError, match="'reference', 'torch', 'cpp', 'triton'"):
        grad_stats([torch.ones(2)], backend="foreach")


@pytest.mark.parametrize("backend", ["torch", pytest.param("cpp", marks=NEEDS_COMPILER)])
def test_a_dense_gradient_in_another_order_is_not_copied(backend: str) -> None:
    grad = torch.randn(8, 16, 32, 64).to(memory_format=torch.channels_last)
    with torch.profiler.profile(profile_memory=True) as profile:
        stats = grad_stats([grad], backend=backend)
    assert max(event.self_cpu_memory_usage for event in profile.events()) < grad.numel()
    torch.testing.assert_close(stats.sum_of_squares, grad.double().square().sum(), rtol=2e-6, atol=0)
