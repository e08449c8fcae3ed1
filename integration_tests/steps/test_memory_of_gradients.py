"""Memory of a backward pass that releases gradients: that of two layers' gradients, not of all."""

from typing import Any

import pytest
import torch
from allocations import peak_bytes
from torch import nn

from opt_config import OptimizerConfig
from opt_stack import get_optimizer, release_gradients

EIGHT_BIT_STATES = {
    "bf16": True,
    "use_precision_aware_optimizer": True,
    "use_distributed_optimizer": True,
    "exp_avg_dtype": torch.uint8,
    "exp_avg_sq_dtype": torch.uint8,
}


def peak_of_backward(*, releases: bool, depth: int, width: int, state_bytes: int = 4, **changes: Any) -> int:
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth))).bfloat16()
    config = OptimizerConfig(lr=0.1, clip_grad=0.0, **EIGHT_BIT_STATES, **changes)
    optimizer = get_optimizer(config, [model])
    if releases:
        release_gradients(optimizer)
    for _ in range(2):
        loss = model(torch.ones(1, width, dtype=torch.bfloat16)).float().sum()
        peak = peak_bytes(loss.backward)
        optimizer.step()
        optimizer.zero_grad()
    state = sum(unit.state_bytes() for unit in optimizer.stepper.units)
    # Remainders and moments; weights are two more bytes.
    assert state == pytest.approx(state_bytes * depth * width**2, rel=0.05)
    return peak


def test_gradients_take_the_memory_of_two_layers_rather_than_of_all() -> None:
    depth, width = 16, 256
    one = 2 * width**2
    assert peak_of_backward(releases=False, depth=depth, width=width) >= depth * one
    assert peak_of_backward(releases=True, depth=depth, width=width) <= 2 * one + (1 << 14)


def test_training_in_five_bytes_a_parameter() -> None:
    """bf16 weights, 8-bit remainders and moments; fp32 main values and the gradient of one layer at a time."""
    depth, width = 16, 256
    options = {"depth": depth, "width": width, "state_bytes": 3, "main_params_dtype": torch.int8}
    one = 2 * width**2
    assert peak_of_backward(releases=True, **options) <= 8 * one
    assert peak_of_backward(releases=False, **options) >= depth * one
