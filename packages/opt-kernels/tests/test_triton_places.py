"""One pass in C++ over tensors reports that nothing changed only if that is so."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from opt_kernels.backends.cpp.snapshot import compiled_snapshot
from opt_kernels.backends.triton import places
from opt_kernels.backends.triton.places import Places

pytestmark = pytest.mark.skipif(
    compiled_snapshot() is None or compiled_snapshot().describe is None,  # type: ignore[union-attr]
    reason="no C++ compiler, or a torch without DLPack's exchange in C",
)

BASE = torch.arange(24.0)
COMPLEX = torch.ones(1, dtype=torch.complex64)


def tensors() -> list[Tensor]:
    return [BASE.view(4, 6), nn.Parameter(torch.zeros(3)), COMPLEX.imag, torch.tensor(1.0), torch.zeros(0, 2)]


CHANGES: dict[str, tuple[int, Callable[[Tensor], object]]] = {
    "another address": (0, lambda tensor: tensor.clone()),
    "another address in its memory": (1, lambda tensor: nn.Parameter(torch.zeros(4)[1:])),
    "other data": (1, lambda tensor: setattr(tensor, "data", torch.zeros(3)) or tensor),
    "a tensor instead of a parameter": (1, lambda tensor: tensor.detach()),
    "another shape": (0, lambda tensor: tensor.view(6, 4)),
    "other strides": (0, lambda tensor: tensor.as_strided((4, 6), (1, 4))),
    "fewer dims": (0, lambda tensor: tensor.view(24)),
    "another dtype": (0, lambda tensor: tensor.view(torch.int32)),
    "half a dtype": (0, lambda tensor: tensor.view(torch.bfloat16)[:, :6]),
    "None": (1, lambda tensor: None),
    "a sparse tensor": (
        0, lambda tensor: torch.sparse_coo_tensor(torch.zeros(1, 0), torch.zeros(0), (3,), check_invariants=True)
    ),
    "the negative bit": (2, lambda tensor: COMPLEX.conj().imag),
    "another empty shape": (4, lambda tensor: tensor.view(2, 0)),
    "another device": (3, lambda tensor: tensor.to("meta")),
}  # fmt: skip


def test_unchanged_tensors_are_the_same() -> None:
    given = tensors()
    known = Places(given)
    assert known.surely_same(given)
    assert known.surely_same([*given])
    given[0].add_(1)
    assert known.surely_same(given)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(change: str) -> None:
    given = tensors()
    known = Places(given)
    index, changed = CHANGES[change]
    given[index] = changed(given[index])  # type: ignore[call-overload]
    assert not known.surely_same(given)


def test_another_number_of_tensors_is_noticed() -> None:
    given = tensors()
    known = Places(given)
    assert not known.surely_same(given[:-1])
    assert not known.surely_same([*given, given[0]])
    assert Places([]).surely_same([])


def test_tensors_with_holes_are_never_surely_the_same() -> None:
    """A view of several elements with the negative bit has holes."""
    given = [BASE[::2]]
    assert not Places(given).surely_same(given)


def test_it_is_never_sure_without_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    given = tensors()
    known = Places(given)
    monkeypatch.setattr(places, "compiled_snapshot", lambda: None)
    assert not known.surely_same(given)
    assert not Places(given).surely_same(given)


def test_it_is_never_sure_without_the_exchange_of_dlpack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.Tensor, "__dlpack_c_exchange_api__")
    older = compiled_snapshot.__wrapped__()
    assert older is not None
    assert older.describe is None
    monkeypatch.setattr(places, "compiled_snapshot", lambda: older)
    given = tensors()
    assert not Places(given).surely_same(given)
