"""The symmetric product kernel: tiles, descriptors, and when it runs. Its numbers are tested with all versions'."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from opt_kernels.backends.triton import HAS_DESCRIPTORS, jit, tl
from opt_kernels.matrices.syrk import dense_product
from opt_kernels.matrices.syrk import triton as syrk

pytestmark = [pytest.mark.needs_extra, pytest.mark.usefixtures("exact_float32")]


@pytest.mark.parametrize("m", [264, 259], ids=["descriptors", "pointers"])  # rows of 259 do not begin on 16 bytes
def test_both_ways_of_loading_read_every_product_of_a_layout(m: int, kernel_device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        unit = 2 * torch.finfo(dtype).eps
        for seed in (0, 1):
            x = torch.randn(2, m, 2 * m, generator=torch.Generator().manual_seed(seed)) / m**0.5
            gram = (x @ x.mT).to(kernel_device, dtype)
            assert syrk.through_descriptors(gram, gram) == (m == 264 and HAS_DESCRIPTORS)
            expected = dense_product(gram.double(), gram.double(), alpha=1.5, added=gram.double(), beta=-0.75)
            found = syrk.halved_product(gram, gram, alpha=1.5, added=gram, beta=-0.75)
            torch.testing.assert_close(found.double(), expected, rtol=max(unit, 2e-6), atol=max(4 * unit, 1e-5))


@jit
def triangle_kernel(rows: tl.tensor, BLOCK: tl.constexpr) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(rows + at, syrk.triangle(at))


def test_every_tile_up_to_the_diagonal_has_its_number(kernel_device: torch.device) -> None:
    # 512 rows of tiles: matrices of 65536 rows.
    expected = [row for row in range(512) for _ in range(row + 1)]
    rows = torch.empty(33 * 4096, dtype=torch.int32, device=kernel_device)
    triangle_kernel[(33,)](rows, BLOCK=4096)
    assert rows.tolist()[: len(expected)] == expected


def test_small_double_and_exact_products_are_left_to_torch() -> None:
    for rows, dtype, precision, pays, multiplied_in in (
        (syrk.SMALLEST_ROWS, torch.bfloat16, "highest", True, "ieee"),
        (syrk.SMALLEST_ROWS - 1, torch.bfloat16, "highest", False, "ieee"),
        (syrk.SMALLEST_ROWS, torch.float16, "high", True, "ieee"),
        (syrk.SMALLEST_ROWS, torch.float64, "highest", False, "ieee"),
        (syrk.SMALLEST_ROWS, torch.float32, "high", True, "tf32"),
        (syrk.SMALLEST_ROWS, torch.float32, "highest", False, "ieee"),
    ):
        torch.set_float32_matmul_precision(precision)
        assert syrk.halving_pays(torch.empty(1, rows, 8, dtype=dtype, device="meta")) is pays, (rows, dtype)
        assert syrk.input_precision(dtype) == multiplied_in
