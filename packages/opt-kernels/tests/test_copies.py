"""Copies of an optimizer after steps: the copy and the original continue independently, as if each were alone."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opt_kernels.backends import Writes
from opt_kernels.optim import AdamW

Pair = tuple[nn.Module, AdamW]
SIZES = (7, 5, 3)  # of features, hidden and outputs


def built(dtype: torch.dtype, options: dict[str, Any]) -> Pair:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(SIZES[0], SIZES[1]), nn.Tanh(), nn.Linear(SIZES[1], SIZES[2])).to(dtype)
    return net, AdamW(net.parameters(), lr=0.1, **options)


def step(pair: Pair, number: int, *, in_place: bool) -> None:
    """One step on gradients that depend on its number alone. With `in_place`, gradients keep their memory."""
    net, optimizer = pair
    generator = torch.Generator().manual_seed(number)
    optimizer.zero_grad(set_to_none=not in_place)
    for param in net.parameters():
        grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        if param.grad is None:
            param.grad = grad
        else:
            param.grad.copy_(grad)
    optimizer.step()


def values(pair: Pair) -> list[Tensor]:
    """Weights and states."""
    net, optimizer = pair
    states = [value for param in net.parameters() for value in optimizer.state[param].values()]
    return [tensor.detach().clone() for tensor in (*net.parameters(), *states)]


def trained(build: Callable[[], Pair], numbers: list[int], *, in_place: bool) -> list[Tensor]:
    """What one optimizer alone has after these steps."""
    pair = build()
    for number in numbers:
        step(pair, number, in_place=in_place)
    return values(pair)


def pickled(pair: Pair) -> Pair:
    made: Pair = pickle.loads(pickle.dumps(pair))
    return made


FORMS = {
    "float32": (torch.float32, {}),
    "bfloat16 with remainders": (torch.bfloat16, {"mains": "remainder"}),
    "8-bit states": (torch.float32, {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8}),
}


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("in_place", [False, True], ids=["new-gradients", "gradients-in-place"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", ["cpp", "torch", "triton"])
def test_a_copy_and_its_original_continue_as_if_each_were_alone(
    backend: str, form: str, in_place: bool, copied: Callable[[Pair], Pair]
) -> None:
    """What an optimizer keeps between steps has addresses of its own tensors: its copy must not use them."""
    if backend == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
    dtype, options = FORMS[form]
    build = partial(built, dtype, {"backend": backend, **options})
    original = build()
    for number in range(3):  # the third repeats what the second kept
        step(original, number, in_place=in_place)
    other = copied(original)
    for number in range(3, 6):
        step(original, number, in_place=in_place)
        step(other, number + 10, in_place=in_place)
    expected = trained(build, [0, 1, 2, 3, 4, 5], in_place=in_place)
    expected_of_other = trained(build, [0, 1, 2, 13, 14, 15], in_place=in_place)
    for found, wanted in zip((original, other), (expected, expected_of_other), strict=True):
        assert all(map(torch.equal, values(found), wanted))
    assert not torch.equal(expected[0], expected_of_other[0])


def test_what_holds_addresses_is_not_copied() -> None:
    """Compiled code would read the memory of the original, which may be freed."""
    kept = Writes([torch.ones(3)])
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="a Writes holds addresses"):
            copied(kept)
