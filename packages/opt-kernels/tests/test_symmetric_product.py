"""Symmetric products: half computed, half mirrored, equal to the whole."""

import pytest
import torch

from opt_kernels.ops.syrk import reference, torch_native

# Sizes on both sides of where halving begins on a CPU, and one that four rows of blocks do not divide.
SIZES = [(1, 1), (63, 65), (256, 512), (256, 1024), (512, 512), (410, 512)]
TOLERANCE = {
    torch.float64: 1e-11,
    torch.float32: 1e-3,
    torch.bfloat16: 2.0,
}  # unit x sums of a thousand terms of size 1


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("m", "k"), SIZES)
def test_a_gram_matrix_equals_its_formula(m: int, k: int, dtype: torch.dtype) -> None:
    x = torch.randn(2, m, k, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    added = reference.symmetric_product(x[..., :m].contiguous(), x[..., :m].mT) if k >= m else x.new_ones(2, m, m)
    expected = reference.symmetric_product(x.double(), x.mT.double(), alpha=1.5, added=added.double(), beta=-0.5)
    got = torch_native.symmetric_product(x, x.mT, alpha=1.5, added=added, beta=-0.5)
    assert got.dtype is dtype
    torch.testing.assert_close(
        got.double(), expected, rtol=8e-3 if dtype is torch.bfloat16 else 0, atol=TOLERANCE[dtype]
    )


def test_a_halved_product_is_symmetric_to_the_last_bit() -> None:
    x = torch.randn(1, 256, 1024, generator=torch.Generator().manual_seed(1))
    assert torch_native.halving_pays(x)
    product = torch_native.symmetric_product(x, x.mT)
    # The blocks on the diagonal are whole products; torch's own are symmetric only to rounding.
    upper = product[..., :64, 64:]
    assert torch.equal(upper, product[..., 64:, :64].mT)
    torch.testing.assert_close(product.double(), x.double() @ x.mT.double(), rtol=0, atol=1e-3)


def test_products_of_commuting_matrices_are_products_in_either_order() -> None:
    a = torch.randn(1, 512, 512, generator=torch.Generator().manual_seed(2))
    a = (a + a.mT) / 64
    square = torch_native.symmetric_product(a, a)
    assert torch_native.halving_pays(a)
    torch.testing.assert_close(torch_native.symmetric_product(square, a), a @ a @ a, rtol=0, atol=1e-4)


def test_arguments_are_only_read() -> None:
    x, added = torch.randn(1, 256, 1024), torch.ones(1, 256, 256)
    before = x.clone()
    torch_native.symmetric_product(x, x.mT, added=added, beta=2.0)
    torch_native.symmetric_product(x[:, :8], x[:, :8].mT, alpha=3.0)
    assert torch.equal(x, before)
    assert torch.equal(added, torch.ones(1, 256, 256))
