"""Whether tensors are laid out as others were: in torch's own guards, and without them."""

import pytest
import torch
from torch import Tensor

from opt_kernels.backends import tables
from opt_kernels.backends.tables import Layouts


def known() -> list[Tensor]:
    return [torch.zeros(4, 6), torch.zeros(24, dtype=torch.bfloat16), torch.zeros(())]


@pytest.fixture(params=["guards", "python"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "python":
        monkeypatch.setattr(tables, "_GUARDS", None)


def test_other_tensors_of_the_same_layout_are_the_same() -> None:
    assert Layouts(known()).same(known())
    assert Layouts([]).same([])


CHANGES = {
    "dtype": torch.zeros(4, 6, dtype=torch.float16),
    "another dtype as wide": torch.zeros(4, 6, dtype=torch.int32),
    "shape": torch.zeros(6, 4),
    "numel": torch.zeros(4, 7),
    "order": torch.zeros(6, 4).t(),
    "holes": torch.zeros(4, 12)[:, ::2],
    "device": torch.zeros(4, 6, device="meta"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_of_one_tensor_is_seen(change: Tensor) -> None:
    assert not Layouts(known()).same([change, *known()[1:]])


def test_a_tensor_less_is_seen() -> None:
    assert not Layouts(known()).same(known()[:2])
