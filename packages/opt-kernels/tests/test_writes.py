"""Writes of an owner are counted like autograd's, and those of others are noticed."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from opt_kernels.backends import writes
from opt_kernels.backends.cpp.compiler import usable
from opt_kernels.backends.writes import Writes


@pytest.fixture(autouse=True, params=["compiled", "in Python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "in Python":
        monkeypatch.setattr(writes, "compiled_snapshot", lambda: None)
    elif not usable():
        pytest.skip("no C++ compiler")


class Subclass(Tensor):
    pass


MADE: dict[str, Callable[[], Tensor]] = {
    "parameter": lambda: nn.Parameter(torch.zeros(3)),
    "tensor": lambda: torch.zeros(()),
    "subclass": lambda: torch.zeros(2).as_subclass(Subclass),
}


@pytest.mark.parametrize("kind", MADE)
def test_a_write_is_counted_once(kind: str) -> None:
    tensors = [MADE["tensor"](), MADE[kind]()]
    known = Writes(tensors)
    before = [tensor._version for tensor in tensors]
    known.count()
    assert [tensor._version for tensor in tensors] == [version + 1 for version in before]
    assert known.are_all_own()
    assert known.of_others() == [0, 0]


@pytest.mark.parametrize("kind", MADE)
def test_writes_of_others_are_noticed(kind: str) -> None:
    tensors = [MADE["tensor"](), MADE[kind]()]
    known = Writes(tensors)
    known.count()
    with torch.no_grad():
        tensors[1].add_(1).mul_(2)
    assert not known.are_all_own()
    assert known.of_others() == [0, 2]
    known.count()
    assert known.are_all_own()


@pytest.mark.parametrize("place", [0, 6, 13, 19])
def test_a_write_to_one_of_many_is_noticed(place: int) -> None:
    """More tensors than compiled code fetches ahead."""
    tensors = [torch.zeros(2) for _ in range(20)]
    known = Writes(tensors)
    for number in range(1, 3):
        known.count()
        assert [tensor._version for tensor in tensors] == [number] * 20
        assert known.are_all_own()
    tensors[place].add_(1)
    assert not known.are_all_own()
    assert known.of_others() == [int(other == place) for other in range(20)]
    known.accept()
    assert known.are_all_own()


def test_accepted_writes_are_own() -> None:
    tensor = torch.zeros(2)
    known = Writes([tensor])
    tensor.add_(1)
    known.accept()
    assert known.are_all_own()


def test_nobody_counts_writes_to_tensors_of_inference_mode() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(2)
    known = Writes([tensor, torch.zeros(2)])
    known.count()
    assert known.are_all_own()
    assert known.of_others() == [0]
