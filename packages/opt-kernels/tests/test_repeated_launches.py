"""An update returns its launches, and repeating them is the same as another update, while they hold."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from opt_kernels.backends.triton import multi_tensor
from opt_kernels.rules.adam import Adam
from opt_kernels.rules.base import Repeatable
from opt_kernels.works import Batch, Hyper, Unchanged, Works

pytestmark = pytest.mark.needs_extra

NUMELS = (3, 1025, 40)


class Training:
    """Adam on tensors that stay in place, with numbers that are written in place."""

    def __init__(self, **options: Any) -> None:
        self.rule = Adam(backend="triton", **options)
        generator = torch.Generator().manual_seed(0)
        self.mains = [torch.randn(numel, generator=generator) for numel in NUMELS]
        self.grads = [torch.randn(numel, generator=generator) for numel in NUMELS]
        states = [self.rule.init_state(main) for main in self.mains]
        self.step, self.lr = torch.tensor(1), torch.tensor(0.1)
        self.scale, self.skip = torch.tensor(1.0, dtype=torch.float64), torch.tensor(False)
        self.columns = Works((), mains=self.mains, states=states)
        self.unchanged = Unchanged()
        self.hyper = Hyper(lr=self.lr, weight_decay=torch.tensor(0.1), step=self.step)

    def update(self, *, stays: bool = True) -> list[Repeatable]:
        unchanged = self.unchanged if stays else None
        works = self.columns.with_grads(self.grads, unchanged=unchanged, grads_at=0, stays=stays)
        return list(self.rule.update_([Batch(self.hyper, works)], grad_scale=self.scale, skip=self.skip) or ())

    def change_numbers(self, number: int) -> None:
        self.step.add_(1)
        self.lr.mul_(0.5)
        self.scale.fill_(1.0 / (number + 1))
        self.skip.fill_(number == 2)
        for grad in self.grads:
            grad.add_(0.1)


def weights(again: Callable[[Training], object], **options: Any) -> list[list[Tensor]]:
    """The weights after each of five updates, of which `again` makes all but the first."""
    training = Training(**options)
    launches = training.update()
    found = []
    for number in range(4):
        training.change_numbers(number)
        if again is repeat:
            for one in launches:
                assert one.holds()
                one.launch()
        else:
            again(training)
        found.append([main.clone() for main in training.mains])
    return found


def repeat(training: Training) -> None:
    raise AssertionError("replaced by the launches")


def test_repeated_launches_follow_what_is_written_in_place() -> None:
    assert len(Training().update()) == 1
    found, expected = weights(repeat), weights(Training.update)
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other)
    assert torch.equal(found[1][0], found[2][0])  # skipped
    assert not torch.equal(found[2][0], found[3][0])


def test_works_that_may_move_are_not_repeated() -> None:
    assert Training().update(stays=False) == []


def test_a_scale_that_is_computed_in_every_update_is_not_repeated() -> None:
    """`maximize` negates it."""
    assert Training(maximize=True).update() == []


def test_launches_of_a_capture_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their scalar block is in the memory of the graph."""
    training = Training()
    training.update()  # makes the tables, which a capture must not
    monkeypatch.setattr(multi_tensor, "is_capturing", lambda device: True)
    assert training.update() == []


@pytest.mark.parametrize(("name", "value"), [("current_stream", 7), ("is_capturing", True)])
def test_launches_hold_on_their_stream_and_outside_of_captures(
    name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    (call,) = Training().update()
    assert call.holds()
    monkeypatch.setattr(multi_tensor, name, lambda device: value)
    assert not call.holds()
