"""C++ and Python compare addresses of tensors and identities of objects in the same way."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from opt_kernels.backends.cpp.compiler import usable
from opt_kernels.backends.cpp.snapshot import compiled_snapshot
from opt_kernels.backends.triton import addresses
from opt_kernels.backends.triton.addresses import Addresses, same_objects


@pytest.fixture(params=["compiled", "in Python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "in Python":
        monkeypatch.setattr(addresses, "compiled_snapshot", lambda: None)
    elif not usable():
        pytest.skip("no C++ compiler")


def tensors() -> list[Tensor]:
    return [torch.zeros(3), nn.Parameter(torch.zeros(2, 2)), torch.zeros(0), torch.zeros(5)[1:]]


def swapped(given: list[Tensor]) -> None:
    given[0], given[1] = given[1], given[0]


def data_replaced(given: list[Tensor]) -> None:
    given[1].data = given[1].detach().clone()


def moved_by_an_element(given: list[Tensor]) -> None:
    given[3] = given[3][1:]


def memory_replaced(given: list[Tensor]) -> None:
    given[0].untyped_storage().resize_(1 << 20)


@pytest.mark.parametrize("move", [swapped, data_replaced, moved_by_an_element, memory_replaced])
def test_a_tensor_that_moved_is_noticed(way: None, move: Callable[[list[Tensor]], None]) -> None:
    given = tensors()
    known = Addresses(given)
    assert known.same(given)
    assert known.same(list(given))
    move(given)
    assert not known.same(given)
    assert Addresses(given).same(given)


@pytest.mark.skipif(not usable(), reason="no C++ compiler")
def test_an_exception_of_torch_does_not_leave_the_compiled_code() -> None:
    given = tensors()
    known = Addresses(given)
    given[2] = torch.sparse_coo_tensor(torch.zeros(1, 0), torch.zeros(0), (3,), check_invariants=True)
    assert not known.same(given)


def test_objects_are_compared_by_identity(way: None) -> None:
    given = tensors()
    assert same_objects(given, list(given))
    assert same_objects([], [])
    assert not same_objects(given, given[:-1])
    assert not same_objects(given[:-1], given)
    assert not same_objects(given, [*given[:-1], given[-1].clone()])
    assert not same_objects([1], [True])


@pytest.mark.skipif(not usable(), reason="no C++ compiler")
def test_it_is_compiled_where_there_is_a_compiler() -> None:
    assert compiled_snapshot() is not None


def test_the_switch_of_compiled_code_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPT_KERNELS_CPP", "0")
    assert compiled_snapshot.__wrapped__() is None


def test_an_old_torch_has_no_function_for_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr", raising=False)
    assert compiled_snapshot.__wrapped__() is None
