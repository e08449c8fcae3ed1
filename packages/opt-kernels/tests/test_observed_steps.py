"""Step hooks and profiler ranges work as in torch.optim."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import profile

from opt_kernels.optim import AdamW

Build = Callable[[Any], torch.optim.Optimizer]


class Counting(AdamW):
    """A user's subclass that overrides `step`."""

    num_steps = 0

    def step(self, closure: Any = None) -> Any:
        self.num_steps += 1
        return super().step(closure)


@pytest.fixture
def param() -> nn.Parameter:
    made = nn.Parameter(torch.ones(3))
    made.grad = torch.ones(3)
    return made


@pytest.mark.parametrize("is_global", [False, True])
def test_hooks_run_around_steps_and_only_while_registered(param: nn.Parameter, is_global: bool) -> None:
    optimizer = AdamW([param], lr=0.1)
    optimizer.step()
    seen: list[tuple[str, float]] = []

    def before(stepping: Any, args: Any, options: Any) -> None:
        assert stepping is optimizer
        seen.append(("before", param.tolist()[0]))

    def after(stepping: Any, args: Any, options: Any) -> None:
        seen.append(("after", param.tolist()[0]))

    if is_global:
        handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    else:
        handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    first = param.tolist()[0]
    optimizer.step()
    second = param.tolist()[0]
    assert seen == [("before", first), ("after", second)]
    assert first != second
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert len(seen) == 2


def test_a_hook_can_replace_the_closure(param: nn.Parameter) -> None:
    optimizer = AdamW([param], lr=0.1)
    optimizer.register_step_pre_hook(lambda stepping, args, options: ((stepping, lambda: 7.0), {}))
    assert optimizer.step() == 7.0  # type: ignore[func-returns-value]


def test_a_profiler_sees_the_step(param: nn.Parameter) -> None:
    optimizer = AdamW([param], lr=0.1)
    optimizer.step()
    with profile() as profiler:
        optimizer.step()
    assert "Optimizer.step#AdamW.step" in [event.key for event in profiler.key_averages()]


def test_hooks_of_a_subclass_run_as_with_torch(param: nn.Parameter) -> None:
    optimizer = Counting([param], lr=0.1)
    seen: list[float] = []
    optimizer.register_step_post_hook(lambda *given: seen.append(param.tolist()[0]))
    optimizer.step()
    assert optimizer.num_steps == 1
    assert set(seen) == {param.tolist()[0]}
