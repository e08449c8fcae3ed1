"""Train the small transformer in one process."""

from typing import Any, NamedTuple

import torch
from tiny_model import joined_batch, make_model, weights
from torch import Tensor

from opt_config import OptimizerConfig
from opt_stack import get_optimizer


class Trained(NamedTuple):
    weights: dict[str, Tensor]
    norms: list[float]


def train_here(
    config: OptimizerConfig, *, steps: int, dtype: torch.dtype = torch.float32, overrides: Any = None
) -> Trained:
    """One process on the joined batch."""
    model = make_model(dtype)
    optimizer = get_optimizer(config, [model], overrides)
    norms = []
    for step in range(steps):
        optimizer.scale_loss(model(joined_batch(step))).backward()
        norms.append(optimizer.step().grad_norm)
        optimizer.zero_grad()
    return Trained(weights(model), norms)
