"""Step hooks and profiler ranges of torch.optim, which a step without them does not pay for."""

from typing import Any

import torch
from torch import nn
from torch.profiler import profile

from opt_config import OptimizerConfig
from opt_stack import Optimizer, get_optimizer


def built() -> tuple[nn.Linear, Optimizer]:
    model = nn.Linear(2, 3)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    return model, get_optimizer(OptimizerConfig(lr=0.1), [model])


def test_hooks_run_around_a_step_while_they_are_registered() -> None:
    model, optimizer = built()
    seen: list[float] = []

    def note(stepping: Any, args: Any, options: Any) -> None:
        assert stepping is optimizer
        seen.append(float(model.bias[0]))

    handles = [optimizer.register_step_pre_hook(note), optimizer.register_step_post_hook(note)]
    before = float(model.bias[0])
    optimizer.step()
    assert seen == [before, float(model.bias[0])]
    assert seen[0] != seen[1]
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert len(seen) == 2


def test_a_profiler_sees_the_step() -> None:
    _, optimizer = built()
    with profile() as profiler:
        assert optimizer.step().success
    assert "Optimizer.step#Optimizer.step" in [event.key for event in profiler.key_averages()]
