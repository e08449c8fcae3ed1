"""Writes of an owner are counted like autograd's, and those of others are noticed."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from opt_kernels.backends import Writes


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


@pytest.mark.parametrize("kind", MADE)
def test_writes_of_others_are_noticed(kind: str) -> None:
    tensors = [MADE["tensor"](), MADE[kind]()]
    known = Writes(tensors)
    known.count()
    with torch.no_grad():
        tensors[1].add_(1).mul_(2)
    assert not known.are_all_own()
    known.count()
    assert known.are_all_own()


@pytest.mark.parametrize("in_inference_mode", [False, True])
def test_an_assignment_to_data_is_noticed_also_at_the_same_address(in_inference_mode: bool) -> None:
    """The version stays as it was, and an allocator may return memory that an assignment has released."""
    memory = bytearray(64)
    with torch.inference_mode(in_inference_mode):
        tensor, others = torch.zeros(4), [torch.frombuffer(memory, dtype=torch.float32) for _ in range(2)]
        known = Writes([torch.zeros(2), tensor])
        assert known.are_all_own()
        while others:
            tensor.data = others.pop()
            assert not known.are_all_own()
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
