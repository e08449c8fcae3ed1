"""State dicts of NAdam and RAdam go to torch.optim's and back."""

import copy
from typing import Any

import pytest
import torch

from opt_kernels import optim

PAIRS = {
    f"{name}, {word}": pair
    for name in ("NAdam", "RAdam")
    for word, pair in {
        "from torch": (getattr(torch.optim, name), getattr(optim, name)),
        "to torch": (getattr(optim, name), getattr(torch.optim, name)),
    }.items()
}


def stepped(optimizer: torch.optim.Optimizer, weight: torch.nn.Parameter, seeds: range) -> None:
    for seed in seeds:
        weight.grad = torch.randn(7, 5, generator=torch.Generator().manual_seed(seed))
        optimizer.step()


@pytest.mark.parametrize("num_steps", [0, 1, 7])
@pytest.mark.parametrize("name", PAIRS)
def test_training_continues_with_the_other_class(name: str, num_steps: int) -> None:
    """Symptom: torch.optim.NAdam raised KeyError('mu_product') at its first step after loading ours."""
    first, second = PAIRS[name]
    options: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.99)}
    if name.startswith("NAdam"):
        options["momentum_decay"] = 0.2
    weight = torch.nn.Parameter(torch.ones(7, 5))
    one = first([weight], **options)
    stepped(one, weight, range(num_steps))
    other_weight = torch.nn.Parameter(weight.detach().clone())
    other = second([other_weight], **options)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    stepped(one, weight, range(num_steps, 12))
    stepped(other, other_weight, range(num_steps, 12))
    # Steps of 0.01 in float32, whose operations torch has in another order.
    torch.testing.assert_close(other_weight, weight, rtol=1e-5, atol=1e-6)
