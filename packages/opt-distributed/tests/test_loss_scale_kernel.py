"""The kernel of a dynamic loss scale against the same arithmetic in torch operations: the bits are equal."""

import itertools
import math
import random
import struct
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from opt_config import DynamicScale
from opt_distributed.comm.device import Host
from opt_distributed.step import scaler
from opt_distributed.step.scaler import DynamicScaler
from opt_kernels.backends.verdict import triton_kernels

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = [
    pytest.mark.needs_extra,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs on a CPU"),
]

PLAIN = DynamicScale(initial=65536.0, minimum=1.0, growth=2.0, backoff=0.5, window=3, hysteresis=2)
AWKWARD = DynamicScale(initial=1e3 / 3, minimum=math.pi, growth=1.1, backoff=0.3, window=1, hysteresis=1)
Flags = tuple[bool, bool | None]  # overflow, error
FLAGS: list[Flags] = [(False, None), (True, None), (False, False), (True, False), (False, True), (True, True)]
ROUNDS = [*itertools.product(FLAGS[2:], repeat=3), *(random.Random(seed).choices(FLAGS, k=20) for seed in range(6))]


def bits(number: float | Tensor) -> bytes:
    return struct.pack("d", float(number))


def states(rule: DynamicScale, rounds: Any, *, stays: bool) -> list[bytes]:
    """All numbers after each step, and the reciprocals that the steps used, read after the next update."""
    made, found, inverses = DynamicScaler(rule), [], []
    for overflow, error in rounds:
        if stays:
            made.stay_on(Host())
        inverses.append(made.inverse)
        made.update(torch.tensor(overflow), unless=None if error is None else torch.tensor(error))
        assert made._on_device is not None
        found += [bits(number) for number in made._on_device.tolist()]
    return found + [bits(inverse) for inverse in inverses]


@pytest.mark.parametrize("stays", [False, True], ids=["new memory", "as in graphs"])
@pytest.mark.parametrize("rule", [PLAIN, AWKWARD], ids=["plain", "awkward"])
def test_the_kernel_gives_the_bits_of_torch_operations(
    rule: DynamicScale, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [states(rule, rounds, stays=stays) for rounds in ROUNDS]
    monkeypatch.setattr(scaler, "verdict_kernels", lambda device: triton_kernels())
    assert [states(rule, rounds, stays=stays) for rounds in ROUNDS] == expected


def test_the_reciprocal_is_that_of_the_scale_before_the_update() -> None:
    """A step may be clipped to another norm after the scale has changed."""
    for stays in (False, True):
        made = DynamicScaler(AWKWARD)
        made.update(torch.tensor(True))
        if stays:
            made.stay_on(Host())
        before, expected = made.inverse, 1.0 / made.scale
        made.update(torch.tensor(True))
        assert bits(before) == bits(expected) != bits(made.inverse)


class Operations(TorchDispatchMode):
    """Lists the operations that a GPU would run: not those that only allocate memory, or make views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and "empty" not in str(func):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_an_update_of_the_scale_is_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was about twenty operations."""

    def operations() -> list[str]:
        made, overflow, error = DynamicScaler(PLAIN), torch.tensor(True), torch.tensor(False)
        made.update(overflow, unless=error)
        with Operations() as counted:
            assert isinstance(made.inverse, Tensor)
            made.update(overflow, unless=error)
        return counted.names

    assert len(operations()) > 15
    kernels, launches = triton_kernels(), []

    def rescaled(before: Tensor, *flags: Any, **options: Any) -> Tensor:
        launches.append(before)
        return torch.empty_like(before)

    monkeypatch.setattr(scaler, "verdict_kernels", lambda device: kernels._replace(rescaled=rescaled))
    assert operations() == []
    assert len(launches) == 2
