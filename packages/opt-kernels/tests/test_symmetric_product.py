"""Symmetric products in every version: half computed, half mirrored, equal to the whole."""

from importlib import import_module
from typing import Any

import pytest
import torch
from elementwise_works import on
from tiers import NIGHT
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from opt_kernels.backends.cpp.compiler import usable
from opt_kernels.matrices import syrk
from opt_kernels.matrices.syrk import cpp, dense_product

pytestmark = pytest.mark.usefixtures("exact_float32")
# Sizes on both sides of where halving begins on a CPU; ones that blocks and tiles do not divide; three rows of tiles.
SIZES = [(1, 1), (63, 65), (128, 64), (128, 130), (256, 512), (256, 1024), (300, 130), (512, 512), (410, 512)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def product_of(backend: str) -> Any:
    if backend == "triton":
        return import_module("opt_kernels.matrices.syrk.triton").halved_product
    return cpp.symmetric_product if backend == "cpp" else syrk.symmetric_product


def matrices(m: int, k: int, dtype: torch.dtype = torch.float32, *, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(m * 1000 + k)
    return (torch.randn(batch, m, k, generator=generator, dtype=torch.float64) / k**0.5).to(dtype)


def assert_close(found: Tensor, exact: Tensor) -> None:
    """Rounded to its dtype, from sums in float32 that lose little before."""
    unit = {torch.float64: 1e-13, torch.float32: 2.0**-19}.get(found.dtype, 2 * torch.finfo(found.dtype).eps)
    torch.testing.assert_close(found.double().cpu(), exact, rtol=unit, atol=unit)


@on("torch", "cpp", "triton")
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_gram_matrix_equals_its_formula(size: tuple[int, int], backend: str, device: torch.device) -> None:
    product = product_of(backend)
    (m, k) = size
    if backend == "triton" and not NIGHT:
        k = min(k, 130)  # an interpreter takes its time
    for dtype in DTYPES[1:] if backend == "triton" else DTYPES:  # float64 products are left to torch
        x, added = (matrices(m, cols, dtype).to(device) for cols in (k, m))
        added = ((added + added.mT) / 2).contiguous()
        before = (x.clone(), added.clone())
        wide = x.cpu().double()
        found = product(x, x.mT)
        assert found.dtype is dtype
        assert_close(found, wide @ wide.mT)
        expected = dense_product(wide, wide.mT, alpha=1.5, added=added.cpu().double(), beta=-0.5)
        assert_close(product(x, x.mT, alpha=1.5, added=added, beta=-0.5), expected)
        assert all(map(torch.equal, (x, added), before))


@on("torch", "cpp", "triton")
def test_halves_are_mirrored_and_views_of_a_batch_taken(backend: str, device: torch.device) -> None:
    """Below the diagonal, whose blocks are whole products: torch's own are symmetric only to rounding."""
    product = product_of(backend)
    wide = matrices(320, 3300, torch.bfloat16 if backend == "cpp" else torch.float32, batch=3).to(device)
    # Rows that are neither next to each other nor at even addresses; the compiled product takes no strides in a row.
    x = wide[:, 16:272, 9:1033] if backend == "cpp" else wide[:, 16:272, 9:777:3]
    found = product(x, x.mT)
    lower = torch.ones(256, 256, dtype=torch.bool, device=device).tril(-128)
    assert torch.equal(found.mT[:, lower], found[:, lower])
    assert_close(found, x.cpu().double() @ x.cpu().double().mT)
    assert all(torch.equal(found[i : i + 1], product(x[i : i + 1], x[i : i + 1].mT)) for i in range(3))
    assert torch.equal(found, product(x.contiguous(), x.contiguous().mT)) or backend == "torch"


class Multiplied(TorchDispatchMode):
    """The dtypes of all matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.bmm, torch.ops.aten.baddbmm, torch.ops.aten.mm, torch.ops.aten.addmm):
            self.dtypes.add(args[-1].dtype)
        return func(*args, **(kwargs or {}))


def test_processors_without_bfloat16_multiply_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syrk, "multiplies_bfloat16", lambda: False)
    x = matrices(96, 256, torch.bfloat16)
    added = matrices(96, 96, torch.bfloat16)
    added = ((added + added.mT) / 2).contiguous()
    out = torch.empty_like(x)
    with Multiplied() as multiplied:
        plain = syrk.symmetric_product(x, x.mT, alpha=1.5)
        gram = dense_product(x, x.mT, alpha=1.5, added=added, beta=-0.5)
        applied = dense_product(gram, x, added=x, beta=2.0, out=out)
    assert multiplied.dtypes == {torch.float32}
    assert applied is out
    assert gram.dtype is torch.bfloat16
    wide = x.double()
    assert_close(plain, 1.5 * wide @ wide.mT)
    assert_close(gram, 1.5 * wide @ wide.mT - 0.5 * added.double())
    assert_close(out, gram.double() @ wide + 2.0 * wide)


def test_products_of_commuting_matrices_equal_in_either_order() -> None:
    a = torch.randn(1, 512, 512, generator=torch.Generator().manual_seed(2))
    a = (a + a.mT) / 64
    assert syrk.halving_pays(a)
    torch.testing.assert_close(syrk.symmetric_product(syrk.symmetric_product(a, a), a), a @ a @ a, rtol=0, atol=1e-4)


def test_compiled_products_keep_nans_and_bits_on_any_threads() -> None:
    x = matrices(256, 384, torch.bfloat16)
    if not usable() or not cpp.takes(x, x.mT, None):
        pytest.skip("no C++ compiler here, or a processor that does not multiply bfloat16 itself")
    before = torch.get_num_threads()
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append(cpp.symmetric_product(x, x.mT))
    torch.set_num_threads(before)
    for other in (found[1], found[0].mT, cpp.symmetric_product(x, x.mT.contiguous())):
        assert torch.equal(found[0], other)
    x[0, 77, 5] = torch.nan
    nan = cpp.symmetric_product(x, x.mT).isnan()[0]
    assert nan[77].all()
    assert nan[:, 77].all()
    assert nan.sum() == 2 * 256 - 1
