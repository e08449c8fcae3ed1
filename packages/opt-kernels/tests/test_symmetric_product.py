"""Symmetric products: half computed, half mirrored, equal to the whole."""

from types import ModuleType

import pytest
import torch

from opt_kernels.backends.cpp.compiler import usable
from opt_kernels.matrices import syrk
from opt_kernels.matrices.syrk import cpp, dense_product

# Sizes on both sides of where halving begins on a CPU, and one that four rows of blocks do not divide.
SIZES = [(1, 1), (63, 65), (128, 130), (256, 512), (256, 1024), (512, 512), (410, 512)]
VERSIONS = [syrk, pytest.param(cpp, marks=pytest.mark.skipif(not usable(), reason="no C++ compiler here"))]
ON_VERSIONS = pytest.mark.parametrize("version", VERSIONS, ids=["torch", "cpp"])
TOLERANCE = {
    torch.float64: 1e-11,
    torch.float32: 1e-3,
    torch.bfloat16: 2.0,
}  # unit x sums of a thousand terms of size 1


@ON_VERSIONS
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("m", "k"), SIZES)
def test_a_gram_matrix_equals_its_formula(version: ModuleType, m: int, k: int, dtype: torch.dtype) -> None:
    x = torch.randn(2, m, k, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    added = dense_product(x[..., :m].contiguous(), x[..., :m].mT) if k >= m else x.new_ones(2, m, m)
    expected = dense_product(x.double(), x.mT.double(), alpha=1.5, added=added.double(), beta=-0.5)
    got = version.symmetric_product(x, x.mT, alpha=1.5, added=added, beta=-0.5)
    assert got.dtype is dtype
    torch.testing.assert_close(
        got.double(), expected, rtol=8e-3 if dtype is torch.bfloat16 else 0, atol=TOLERANCE[dtype]
    )


def test_a_halved_product_is_symmetric_to_the_last_bit() -> None:
    x = torch.randn(1, 256, 1024, generator=torch.Generator().manual_seed(1))
    assert syrk.halving_pays(x)
    product = syrk.symmetric_product(x, x.mT)
    # The blocks on the diagonal are whole products; torch's own are symmetric only to rounding.
    upper = product[..., :64, 64:]
    assert torch.equal(upper, product[..., 64:, :64].mT)
    torch.testing.assert_close(product.double(), x.double() @ x.mT.double(), rtol=0, atol=1e-3)


def test_products_of_commuting_matrices_are_products_in_either_order() -> None:
    a = torch.randn(1, 512, 512, generator=torch.Generator().manual_seed(2))
    a = (a + a.mT) / 64
    square = syrk.symmetric_product(a, a)
    assert syrk.halving_pays(a)
    torch.testing.assert_close(syrk.symmetric_product(square, a), a @ a @ a, rtol=0, atol=1e-4)


@ON_VERSIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_arguments_are_only_read(version: ModuleType, dtype: torch.dtype) -> None:
    x, added = torch.randn(1, 256, 1024).to(dtype), torch.ones(1, 256, 256, dtype=dtype)
    before = x.clone()
    version.symmetric_product(x, x.mT, added=added, beta=2.0)
    version.symmetric_product(x[:, :8], x[:, :8].mT, alpha=3.0)
    assert torch.equal(x, before)
    assert torch.equal(added, torch.ones(1, 256, 256, dtype=dtype))


@pytest.fixture
def compiled() -> None:
    """Only where the compiled product is taken at all."""
    x = torch.ones(1, 128, 128, dtype=torch.bfloat16)
    if not usable() or not cpp.takes(x, x.mT, None):
        pytest.skip("no C++ compiler here, or a processor that does not multiply bfloat16 itself")


@pytest.mark.usefixtures("compiled")
def test_a_compiled_product_is_mirrored_and_the_same_on_any_number_of_threads() -> None:
    x = torch.randn(2, 256, 384, generator=torch.Generator().manual_seed(3)).bfloat16()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = cpp.symmetric_product(x, x.mT)
        torch.set_num_threads(3)
        assert torch.equal(cpp.symmetric_product(x, x.mT), alone)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(alone, alone.mT)


@pytest.mark.usefixtures("compiled")
def test_a_compiled_product_takes_views_and_either_order_of_right() -> None:
    wide = torch.randn(1, 160, 300, generator=torch.Generator().manual_seed(4)).bfloat16()
    x = wide[:, 16:144, 9:265]  # rows that are neither next to each other nor at even addresses
    assert cpp.takes(x, x.mT, None)
    expected = cpp.symmetric_product(x.contiguous(), x.contiguous().mT)
    assert torch.equal(cpp.symmetric_product(x, x.mT), expected)
    assert torch.equal(cpp.symmetric_product(x, x.mT.contiguous()), expected)
    torch.testing.assert_close(expected.double(), x.double() @ x.double().mT, rtol=2**-8, atol=1e-3)


@pytest.mark.usefixtures("compiled")
def test_a_compiled_product_loses_no_nan() -> None:
    x = torch.ones(1, 128, 128, dtype=torch.bfloat16)
    x[0, 77, 5] = torch.nan
    product = cpp.symmetric_product(x, x.mT)
    nan = product.isnan()[0]
    assert nan[77].all()
    assert nan[:, 77].all()
    assert nan.sum() == 2 * 128 - 1
