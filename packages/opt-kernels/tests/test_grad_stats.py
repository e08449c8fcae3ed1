"""The statistics sweep on every backend: sums, non-finite elements and zeros, against counts in float64."""

import math

import pytest
import torch
from elementwise_works import ON_BACKENDS, ON_FAST, device_of, on
from torch import Tensor

from opt_kernels.backends import grad_stats
from opt_kernels.backends.reference import GradStats
from opt_kernels.backends.torch_native import PIECE_NUMEL, ROW_NUMEL

pytestmark = pytest.mark.usefixtures("poisoned")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [0, 1, 63, 1025, ROW_NUMEL, ROW_NUMEL + 1, 65537]
PIECES = [7, PIECE_NUMEL - 1, PIECE_NUMEL, PIECE_NUMEL + 1, 2 * PIECE_NUMEL + ROW_NUMEL + 3]


def dtypes_of(backend: str) -> list[torch.dtype]:
    return DTYPES if backend == "triton" else [*DTYPES, torch.float64]


def gradient(numel: int, dtype: torch.dtype, backend: str = "torch") -> Tensor:
    """Noise, a third of it zero."""
    noise = torch.randn(2, numel, generator=torch.Generator().manual_seed(numel))
    return (noise[0] * (noise[1] > -0.43)).to(device_of(backend), dtype)


def check(stats: GradStats, grads: list[Tensor], norm_type: float = 2.0, rtol: float = 2e-6) -> None:
    exact = torch.cat([grad.flatten().double() for grad in grads]).abs()
    power = exact.max() if norm_type == math.inf else exact.pow(norm_type).sum()
    # float32 sums of rows of 2^12, hundreds of terms in a lane: some ten roundings of 2^-24, all to one side at worst.
    torch.testing.assert_close(stats.sum_of_squares, power, rtol=rtol, atol=0)
    assert stats.zeros == (exact == 0).sum()
    assert stats.nonfinite == (~exact.isfinite()).sum()


@ON_BACKENDS
@pytest.mark.parametrize("numel", SIZES)
def test_sums_and_zeros_equal_float64_for_any_dtype_and_norm(backend: str, numel: int) -> None:
    numel = min(numel, 5000) if backend == "triton" else numel  # an interpreter takes its time
    every = []
    for dtype in dtypes_of(backend):
        grads = [gradient(numel, dtype, backend), gradient(numel + 5, dtype, backend).view(1, -1, 1)]
        before = [grad.clone() for grad in grads]
        check(grad_stats(grads, backend=backend), grads)
        assert all(map(torch.equal, grads, before))
        every += grads
    check(grad_stats(every, backend=backend), every)
    for norm_type in (1.0, 3.0, math.inf):
        check(grad_stats(every, norm_type=norm_type, backend=backend), every, norm_type)


def test_ordinary_gradients_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exact sums of the reference are for sums that may have overflowed or underflowed."""
    monkeypatch.setattr("opt_kernels.backends.reference.grad_stats", None)
    grads = [gradient(numel, torch.float32) for numel in (1, ROW_NUMEL, ROW_NUMEL + 5)]
    check(grad_stats(grads, backend="torch"), grads)


@ON_BACKENDS
def test_no_elements_have_no_norm_and_zeros_count_on_request(backend: str) -> None:
    device = device_of(backend)
    zeros = torch.zeros(9, device=device)
    ones = torch.ones(3, device=device)
    assert grad_stats([zeros, ones], count_zeros=False, backend=backend).zeros == 0
    for grads, expected in (([zeros, ones], 9), ([zeros], 9), ([ones], 0)):
        assert grad_stats(grads, backend=backend).zeros == expected
    # What a rank without rows of an FSDP2 parameter asks for.
    for dtype in [*DTYPES, torch.float64]:
        empty = [torch.empty(shape, dtype=dtype, device=device) for shape in ((0,), (0, 3), (2, 0))]
        for grads in ([], empty[:1], empty[1:]):
            stats = grad_stats(grads, backend=backend)
            assert [number.item() for number in stats] == [0, 0, 0]
            assert (stats.sum_of_squares.dtype, stats.zeros.dtype) == (torch.float64, torch.int64)
            assert not grads or stats.sum_of_squares.device.type == device.type
    meta = [torch.empty(0, dtype=torch.float16, device="meta")]
    assert {number.device.type for number in grad_stats(meta, backend="torch")} == {"meta"}


@ON_BACKENDS
def test_every_non_finite_element_is_counted(backend: str) -> None:
    for dtype in dtypes_of(backend):
        for bad in (torch.inf, -torch.inf, torch.nan):
            grads = [gradient(1025, dtype, backend), gradient(40000, dtype, backend)]
            grads[0][0] = grads[1][39999] = grads[1][5] = bad
            stats = grad_stats(grads, backend=backend)
            assert stats.nonfinite == 3
            assert not stats.sum_of_squares.isfinite()
            assert stats.zeros == sum(int((grad == 0).sum()) for grad in grads)


@ON_BACKENDS
def test_squares_beyond_float32_are_neither_lost_nor_infinite(backend: str) -> None:
    for size in (1e-30, 1e-22, 1e-20, 1e18, 1e19, 1e30):
        grads = [torch.full((1000,), size, device=device_of(backend)), gradient(1025, torch.float32, backend) * size]
        check(grad_stats(grads, backend=backend), grads)


@ON_BACKENDS
def test_gradients_may_be_views_without_alignment_or_order(backend: str) -> None:
    whole = gradient(65537, torch.float32, backend)
    views = [whole[1:], whole[3::2], whole[: 256 * 256].view(256, 256).t(), whole[:4096].view(64, 64)[:, ::2]]
    check(grad_stats(views, backend=backend), views)


@ON_FAST
def test_sums_are_as_exact_as_documented_on_any_thread_count(backend: str) -> None:
    sizes = SIZES if backend == "triton" else [*SIZES, *PIECES]
    grads = [gradient(numel, dtype, backend) for dtype in dtypes_of(backend) for numel in sizes]
    before = torch.get_num_threads()
    sums = set()
    for threads in (1,) if backend == "triton" else (1, 2, 3):
        torch.set_num_threads(threads)
        stats = grad_stats(grads, backend=backend)
        check(stats, grads, rtol=2e-7)
        sums.add(stats.sum_of_squares.item())
    torch.set_num_threads(before)
    assert len(sums) == 1


def test_what_is_no_norm_is_refused() -> None:
    for norm_type in (0.0, -2.0, math.nan):
        with pytest.raises(ValueError, match=r"pass a number above 0, or math\.inf"):
            grad_stats([torch.ones(2)], norm_type=norm_type)


@on("torch", "cpp")
def test_a_dense_gradient_in_another_order_is_not_copied(backend: str) -> None:
    grad = torch.randn(8, 16, 32, 64).to(memory_format=torch.channels_last)
    with torch.profiler.profile(profile_memory=True) as profile:
        stats = grad_stats([grad], backend=backend)
    assert max(event.self_cpu_memory_usage for event in profile.events()) < grad.numel()
    check(stats, [grad])
