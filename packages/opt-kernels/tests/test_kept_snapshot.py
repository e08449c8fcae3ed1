"""C++ and Python notice the same changes of tensors since the last step."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from opt_kernels.backends.cpp.compiler import usable
from opt_kernels.backends.cpp.snapshot import compiled_snapshot
from opt_kernels.backends.kept import snapshot
from opt_kernels.backends.kept.snapshot import Snapshot

BASE = torch.arange(24.0)
COMPLEX = torch.ones(1, dtype=torch.complex64)


@pytest.fixture(autouse=True, params=["compiled", "in Python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "in Python":
        monkeypatch.setattr(snapshot, "compiled_snapshot", lambda: None)
    elif not usable():
        pytest.skip("no C++ compiler")
    return str(request.param)


def tensors() -> list[Tensor]:
    return [
        BASE.view(4, 6),
        nn.Parameter(torch.zeros(3)),
        COMPLEX.imag,
        torch.tensor(1.0),
        torch.zeros(0, 2),
        BASE[::2],
    ]


def params() -> list[nn.Parameter]:
    made = [nn.Parameter(torch.zeros(shape)) for shape in ((2, 3), (5,), ())]
    for param in made:
        param.grad = torch.zeros_like(param)
    return made


def other_data(tensor: Tensor) -> Tensor:
    tensor.data = torch.zeros(3)
    return tensor


CHANGES: dict[str, tuple[int, Callable[[Tensor], object]]] = {
    "another address": (0, lambda tensor: tensor.clone()),
    "another address in its memory": (5, lambda tensor: BASE[1::2]),
    "other data": (1, other_data),
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
    first, others = tensors()[:2], tensors()[2:]
    known = Snapshot(first, others)
    assert known.holds(first, others)
    assert known.holds([*first], [*others])
    first[0].add_(0)
    assert known.holds(first, others)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(change: str) -> None:
    given = tensors()
    known = Snapshot([], given)
    index, changed = CHANGES[change]
    given[index] = changed(given[index])  # type: ignore[call-overload]
    assert not known.holds([], given)


@pytest.mark.parametrize("change", [name for name in CHANGES if name not in ("another address", "other data")])
def test_only_the_address_of_a_gradient_may_change(change: str) -> None:
    given = tensors()
    known = Snapshot(given)
    index, changed = CHANGES[change]
    given[index] = changed(given[index])  # type: ignore[call-overload]
    is_address = change.startswith("another address")
    assert known.holds(given, []) is is_address
    assert not is_address or known.grads_at == tuple(tensor.data_ptr() for tensor in given)


def test_another_number_of_tensors_is_noticed() -> None:
    given = tensors()
    for changed in (given[:-1], [*given, given[0]]):
        assert not Snapshot(given).holds(changed, [])
        assert not Snapshot([], given).holds([], changed)
        assert not Snapshot(given[:1], given[1:]).holds(given[:2], given[2:])
    assert Snapshot([]).holds([], [])


def test_it_reads_the_gradients_of_parameters() -> None:
    given = params()
    known = Snapshot(given, reads_grads=True)
    assert known.holds([*given], [])
    given[1].grad = torch.ones(5)
    assert known.holds([*given], [])
    assert known.grads_at == tuple(param.grad.data_ptr() for param in given if param.grad is not None)


def test_the_key_says_where_the_gradients_are() -> None:
    given = params()
    known = Snapshot(given, reads_grads=True)
    keys, old, new = [known.key], given[1].grad, torch.ones(5)
    for grad in (old, new, new, old):
        given[1].grad = grad
        assert known.holds([*given], [])
        keys.append(known.key)
    assert [key == keys[0] for key in keys] == [True, True, False, False, True]


def no_gradient(given: list[nn.Parameter]) -> None:
    given[1].grad = None


def moved_parameter(given: list[nn.Parameter]) -> None:
    given[1].data = torch.zeros(5)


def swapped_parameter(given: list[nn.Parameter]) -> None:
    other = nn.Parameter(torch.zeros(5))
    other.grad = torch.zeros(5)
    torch.utils.swap_tensors(given[1], other)


def transposed_gradient(given: list[nn.Parameter]) -> None:
    given[0].grad = torch.zeros(3, 2).t()


@pytest.mark.parametrize("change", [no_gradient, moved_parameter, swapped_parameter, transposed_gradient])
def test_a_change_of_a_parameter_or_its_gradient_is_noticed(change: Callable[[list[nn.Parameter]], None]) -> None:
    given = params()
    known = Snapshot(given, reads_grads=True)
    change(given)
    assert not known.holds(given, [])


def many_params() -> list[nn.Parameter]:
    """More than compiled code fetches ahead."""
    made = [nn.Parameter(torch.zeros(place % 3 + 1, 2)) for place in range(20)]
    for param in made:
        param.grad = torch.zeros_like(param)
    return made


def test_gradients_of_many_parameters_may_be_freed_and_made_again() -> None:
    given, others = many_params(), [torch.zeros(3) for _ in range(9)]
    known = Snapshot(given, others, reads_grads=True)
    for step in range(5):
        for param in given:
            param.grad = None
        spacing = [torch.zeros(step + 1) for _ in given]  # so that others come to lie where these were
        for param in given:
            param.grad = torch.zeros_like(param)
        assert known.holds(given, others)
        assert known.grads_at == tuple(param.grad.data_ptr() for param in given if param.grad is not None)
        del spacing


def reallocated(given: list[nn.Parameter], place: int) -> None:
    kept = given[place].detach().clone()
    given[place].untyped_storage().resize_(1 << 16)
    given[place].data.copy_(kept)


def elsewhere(given: list[nn.Parameter], place: int) -> None:
    given[place].data = given[place].detach().clone()


def later_in_its_memory(given: list[nn.Parameter], place: int) -> None:
    memory = torch.zeros(64)
    given[place].data = memory[: given[place].numel()].view_as(given[place])


def no_gradient_of(given: list[nn.Parameter], place: int) -> None:
    given[place].grad = None


@pytest.mark.parametrize("place", [0, 6, 13, 19])
@pytest.mark.parametrize("change", [reallocated, elsewhere, later_in_its_memory, no_gradient_of])
def test_a_change_of_one_of_many_parameters_is_noticed(
    change: Callable[[list[nn.Parameter], int], None], place: int
) -> None:
    given = many_params()
    known = Snapshot(given, reads_grads=True)
    assert known.holds(given, [])
    change(given, place)
    assert not known.holds(given, [])


def test_a_gradient_that_moves_within_its_memory_has_another_address() -> None:
    given, memory = many_params(), torch.zeros(100)
    known = Snapshot(given, reads_grads=True)
    for start in (0, 10, 30, 30):
        given[8].grad = memory[start : start + given[8].numel()].view_as(given[8])
        assert known.holds(given, [])
        assert known.grads_at[8] == memory.data_ptr() + 4 * start


class Subclass(Tensor):
    pass


def test_only_plain_objects_are_compared_in_compiled_code(way: str) -> None:
    given = [torch.zeros(2), torch.zeros(2)]
    known = Snapshot(given)
    for changed in ([given[0], given[1].as_subclass(Subclass)], tuple(given), [given[0], "a string"]):
        assert way == "in Python" or not known.holds(changed, [])  # type: ignore[arg-type]


@pytest.mark.skipif(not usable(), reason="no C++ compiler")
def test_it_is_compiled_where_there_is_a_compiler() -> None:
    assert compiled_snapshot() is not None


def test_the_switch_of_compiled_code_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPT_KERNELS_CPP", "0")
    assert compiled_snapshot.__wrapped__() is None


def test_nothing_is_compiled_where_objects_have_another_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opt_kernels.backends.cpp.snapshot._words_of", lambda tensor: None)
    assert compiled_snapshot.__wrapped__() is None
