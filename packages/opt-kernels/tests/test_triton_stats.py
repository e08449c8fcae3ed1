"""The statistics sweep against the float64 reference."""

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from opt_kernels.backends.reference import grad_stats as reference
from opt_kernels.backends.triton.grad_stats import grad_stats

pytestmark = pytest.mark.needs_extra

SIZES = (0, 1, 63, 1025, 65537)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def gradients(device: torch.device, dtypes: tuple[torch.dtype, ...] = DTYPES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    made = [torch.randn(n, generator=generator).to(dtype).to(device) for dtype in dtypes for n in SIZES]
    for grad in made:
        grad[::97] = 0
    return made


def assert_equal_stats(grads: list[Tensor], *, norm_type: float = 2.0) -> None:
    found, true = (version(grads, norm_type=norm_type) for version in (grad_stats, reference.grad_stats))
    # Sums of 16 elements a lane and 1024 lanes in float32: a few roundings each, at random.
    torch.testing.assert_close(found.sum_of_squares, true.sum_of_squares, rtol=2e-7, atol=0, equal_nan=True)
    assert found.sum_of_squares.dtype is torch.float64
    assert found.nonfinite.item() == true.nonfinite.item()
    assert found.zeros.item() == true.zeros.item()


@pytest.mark.parametrize("norm_type", [2.0, math.inf, 1.0], ids=str)
@pytest.mark.parametrize("dtypes", [(d,) for d in DTYPES] + [DTYPES], ids=str)
def test_statistics_equal_the_reference(
    dtypes: tuple[torch.dtype, ...], norm_type: float, kernel_device: torch.device
) -> None:
    assert_equal_stats(gradients(kernel_device, dtypes), norm_type=norm_type)


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1024, 65536])
def test_every_non_finite_element_is_counted(special: float, place: int, kernel_device: torch.device) -> None:
    grads = gradients(kernel_device)
    grads[4][place] = special
    grads[-1][place] = special
    found = grad_stats(grads)
    assert found.nonfinite.item() == 2
    assert not found.sum_of_squares.isfinite()


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e18, 1e30])
def test_sums_survive_squares_that_float32_cannot_hold(size: float, kernel_device: torch.device) -> None:
    assert_equal_stats([grad * size for grad in gradients(kernel_device, (torch.float32,))])


def test_the_sum_does_not_depend_on_how_often_it_is_taken(kernel_device: torch.device) -> None:
    grads = gradients(kernel_device)
    assert len({grad_stats(grads).sum_of_squares.item() for _ in range(3)}) == 1


def test_zeros_are_not_reported_unless_requested(kernel_device: torch.device) -> None:
    assert grad_stats(gradients(kernel_device), count_zeros=False).zeros.item() == 0


def test_masked_lanes_are_no_zeros(kernel_device: torch.device) -> None:
    assert grad_stats([torch.ones(3, device=kernel_device)]).zeros.item() == 0


def test_gradients_may_be_views_without_alignment_or_order(kernel_device: torch.device) -> None:
    whole = gradients(kernel_device, (torch.float32,))[-1]
    assert_equal_stats([whole[1:], whole[3::2], whole[: 256 * 256].view(256, 256).t()])


def test_no_gradients_have_no_norm() -> None:
    found = grad_stats([])
    assert (found.sum_of_squares.item(), found.nonfinite.item(), found.zeros.item()) == (0, 0, 0)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_gradients_without_elements_have_norm_zero(dtype: torch.dtype, kernel_device: torch.device) -> None:
    found = grad_stats([torch.empty(0, 3, dtype=dtype, device=kernel_device)])
    assert [number.item() for number in found] == [0, 0, 0]
    assert found.sum_of_squares.device.type == kernel_device.type


def test_a_norm_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="norm_type"):
        grad_stats([torch.ones(1)], norm_type=0.0)
