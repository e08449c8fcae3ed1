"""The symmetric product kernel, by descriptors and by pointers, against float64."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from opt_kernels.backends.triton import HAS_DESCRIPTORS, jit, tl
from opt_kernels.matrices.syrk import dense_product
from opt_kernels.matrices.syrk import triton as syrk

pytestmark = pytest.mark.needs_extra

# m, k: one element; one tile with a rest of both; tiles that both divide; three rows of tiles.
SIZES = [(1, 1), (63, 65), (128, 64), (256, 192), (300, 130)]
# What the result is rounded to; sums of k products of size 1 / k are of size 1, and lose little before that.
UNIT = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def matrices(m: int, k: int, dtype: torch.dtype, device: torch.device, *, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(m * 1000 + k)
    return (torch.randn(batch, m, k, generator=generator) / k**0.5).to(dtype).to(device)


@pytest.fixture(autouse=True)
def exact_float32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("m", "k", "dtype"),
    [(*size, torch.float32) for size in SIZES] + [(300, 130, torch.bfloat16), (256, 192, torch.float16)],
    ids=str,
)
def test_a_gram_matrix_equals_float64(m: int, k: int, dtype: torch.dtype, kernel_device: torch.device) -> None:
    x = matrices(m, k, dtype, kernel_device)
    expected = dense_product(x.double(), x.double().mT)
    found = syrk.halved_product(x, x.mT)
    assert found.dtype is dtype
    torch.testing.assert_close(found.double(), expected, rtol=UNIT[dtype], atol=UNIT[dtype])


@pytest.mark.parametrize("dtype", UNIT, ids=str)
@pytest.mark.parametrize("aligned", [True, False], ids=["descriptors", "pointers"])
def test_the_added_matrix_and_both_factors_are_applied(
    aligned: bool, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    m = 264 if aligned else 259  # rows of 259 elements do not begin on 16 bytes
    x = matrices(m, 2 * m, dtype, kernel_device)
    gram = (x @ x.mT).to(dtype)
    gram = ((gram + gram.mT) / 2).contiguous()
    assert syrk.through_descriptors(gram, gram) == (aligned and HAS_DESCRIPTORS)
    expected = dense_product(gram.double(), gram.double(), alpha=1.5, added=gram.double(), beta=-0.75)
    found = syrk.halved_product(gram, gram, alpha=1.5, added=gram, beta=-0.75)
    torch.testing.assert_close(found.double(), expected, rtol=UNIT[dtype], atol=4 * UNIT[dtype])


@pytest.mark.parametrize(("m", "k"), [(256, 64), (300, 130)])
def test_the_result_is_symmetric_to_the_last_bit(m: int, k: int, kernel_device: torch.device) -> None:
    x = matrices(m, k, torch.float32, kernel_device)
    found = syrk.halved_product(x, x.mT)
    lower = torch.ones_like(found[0], dtype=torch.bool).tril(-syrk.TILE)
    assert torch.equal(found.mT[:, lower], found[:, lower])


def test_every_matrix_of_a_batch_is_its_own(kernel_device: torch.device) -> None:
    x = matrices(130, 64, torch.float32, kernel_device, batch=3)
    together = syrk.halved_product(x, x.mT)
    for i in range(3):
        assert torch.equal(together[i : i + 1], syrk.halved_product(x[i : i + 1], x[i : i + 1].mT))


def test_operands_may_be_views_with_strides(kernel_device: torch.device) -> None:
    x = matrices(128, 400, torch.float32, kernel_device)[:, :, ::3]
    found = syrk.halved_product(x, x.mT)
    torch.testing.assert_close(found.double(), x.double() @ x.double().mT, rtol=UNIT[torch.float32], atol=1e-6)


@jit
def triangle_kernel(rows: tl.tensor, BLOCK: tl.constexpr) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(rows + at, syrk.triangle(at))


def test_every_tile_up_to_the_diagonal_has_its_number(kernel_device: torch.device) -> None:
    # 512 rows of tiles: matrices of 65536 rows.
    expected = [row for row in range(512) for _ in range(row + 1)]
    rows = torch.empty(131072 + 256, dtype=torch.int32, device=kernel_device)
    triangle_kernel[(513,)](rows, BLOCK=256)
    assert rows.tolist()[: len(expected)] == expected


@pytest.mark.parametrize(("rows", "dtype", "precision", "pays"), [
    (syrk.SMALLEST_ROWS, torch.bfloat16, "highest", True),
    (syrk.SMALLEST_ROWS - 1, torch.bfloat16, "highest", False),
    (syrk.SMALLEST_ROWS, torch.float64, "highest", False),
    (syrk.SMALLEST_ROWS, torch.float32, "high", True),
    # Without TF32 the kernel has no matrix instruction to use, and kept 11 kB of its accumulator in memory.
    (syrk.SMALLEST_ROWS, torch.float32, "highest", False),
])  # fmt: skip
def test_small_double_and_exact_float32_products_are_left_to_torch(
    rows: int, dtype: torch.dtype, precision: str, pays: bool
) -> None:
    torch.set_float32_matmul_precision(precision)
    assert syrk.halving_pays(torch.empty(1, rows, 8, dtype=dtype, device="meta")) is pays


@pytest.mark.parametrize(("dtype", "precision", "expected"), [
    (torch.float32, "high", "tf32"), (torch.float32, "highest", "ieee"), (torch.float16, "high", "ieee"),
])  # fmt: skip
def test_float32_tiles_are_multiplied_as_torch_is_set_to(dtype: torch.dtype, precision: str, expected: str) -> None:
    torch.set_float32_matmul_precision(precision)
    assert syrk.input_precision(dtype) == expected


@pytest.mark.skipif(not HAS_DESCRIPTORS, reason="this Triton has no descriptors on the host")
def test_every_product_of_a_layout_reads_its_own_matrix(kernel_device: torch.device) -> None:
    first, second = (matrices(264, 136, torch.float32, kernel_device) + shift for shift in (0.0, 1.0))
    if not syrk.through_descriptors(first, first.mT):
        pytest.skip("this device has no TMA")
    for x in (first, second, first):
        expected = dense_product(x.double(), x.double().mT)
        torch.testing.assert_close(syrk.halved_product(x, x.mT).double(), expected, rtol=1e-5, atol=1e-5)
