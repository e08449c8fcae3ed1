"""Rank programs for the tests of the step; importable, so that spawned processes find them."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tiny_model import joined_batch, make_model, my_batch, weights
from torch import Tensor

from opt_config import OptimizerConfig
from opt_stack import get_optimizer


class Trained(NamedTuple):
    weights: dict[str, Tensor]
    norms: list[float]
    losses: list[float]


def train_here(
    config: OptimizerConfig, *, steps: int, dtype: torch.dtype = torch.float32, overrides: Any = None
) -> Trained:
    """One process on the joined batch."""
    return _train(config, steps=steps, dtype=dtype, overrides=overrides, batch=joined_batch)


def train_rank(config: OptimizerConfig, steps: int, dtype: torch.dtype, overrides: Any = None) -> Trained:
    """One rank of a world on its part of the joined batch."""
    return _train(config, steps=steps, dtype=dtype, overrides=overrides, batch=my_batch)


def _train(config: OptimizerConfig, *, steps: int, dtype: torch.dtype, overrides: Any, batch: Any) -> Trained:
    model = make_model(dtype)
    optimizer = get_optimizer(config, [model], overrides)
    norms, losses = [], []
    for step in range(steps):
        loss = model(batch(step))
        optimizer.scale_loss(loss).backward()
        result = optimizer.step()
        optimizer.zero_grad()
        norms.append(result.grad_norm)
        losses.append(loss.item())
    return Trained(weights(model), norms, losses)


class AfterOverflow(NamedTuple):
    result: tuple[Any, ...]
    before: dict[str, Any]
    after: dict[str, Any]
    scales: list[float]


def overflow_on_one_rank(config: OptimizerConfig, dtype: torch.dtype, bad: float) -> AfterOverflow:
    """Two good steps, then one with a bad gradient on the last rank only, then two more bad ones."""
    model = make_model(dtype)
    optimizer = get_optimizer(config, [model], {})

    def backward(step: int) -> None:
        optimizer.zero_grad()
        optimizer.scale_loss(model(my_batch(step))).backward()

    for step in range(2):
        backward(step)
        optimizer.step()
    scales = [optimizer.get_loss_scale().item()]
    before = _everything(model, optimizer)
    for step in range(2, 5):
        backward(step)
        if dist.get_rank() == dist.get_world_size() - 1:
            model.head.weight.grad[0, 0] = bad
        result = optimizer.step()
        scales.append(optimizer.get_loss_scale().item())
    return AfterOverflow(tuple(result), before, _everything(model, optimizer), scales)


def _everything(model: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
    state = {i: {k: v.clone() for k, v in s.items()} for i, s in optimizer.state_dict()["state"].items()}
    return {"weights": weights(model), "state": state}
