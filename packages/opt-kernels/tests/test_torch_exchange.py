"""State dicts go to the class of the same name in torch.optim and back."""

import copy
from typing import Any

import pytest
import torch

from opt_kernels import optim

ADAM: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.99)}
OPTIONS: dict[str, dict[str, Any]] = {
    "Adam": ADAM,
    "AdamW": ADAM,
    "NAdam": ADAM | {"momentum_decay": 0.2},
    "RAdam": ADAM,
    "SGD": {"lr": 1e-2, "weight_decay": 0.1, "momentum": 0.9, "nesterov": True},
}


def stepped(optimizer: torch.optim.Optimizer, weight: torch.nn.Parameter, seeds: range) -> None:
    for seed in seeds:
        weight.grad = torch.randn(7, 5, generator=torch.Generator().manual_seed(seed))
        optimizer.step()


@pytest.mark.parametrize("num_steps", [0, 1, 7])
@pytest.mark.parametrize("to_torch", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_training_continues_with_the_other_class(name: str, to_torch: bool, num_steps: int) -> None:
    """Symptom: torch.optim.NAdam raised KeyError('mu_product') at its first step after loading ours."""
    first, second = (getattr(module, name) for module in (torch.optim, optim)[:: -1 if to_torch else 1])
    weight = torch.nn.Parameter(torch.ones(7, 5))
    one = first([weight], **OPTIONS[name])
    stepped(one, weight, range(num_steps))
    other_weight = torch.nn.Parameter(weight.detach().clone())
    other = second([other_weight], **OPTIONS[name])
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    stepped(one, weight, range(num_steps, 12))
    stepped(other, other_weight, range(num_steps, 12))
    # Steps of 0.01 in float32, whose operations torch has in another order.
    torch.testing.assert_close(other_weight, weight, rtol=1e-5, atol=1e-6)
