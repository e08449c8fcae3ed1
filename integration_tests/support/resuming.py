"""Rank programs for the tests of resuming; importable, so that spawned processes find them."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tiny_model import Tiny, joined_batch, make_model, my_batch
from torch.distributed.fsdp import fully_shard

from opt_checkpoint import load, save, sharded_model
from opt_config import OptimizerConfig
from opt_stack import Optimizer, get_optimizer

BEFORE, AFTER = 4, 8  # steps until the save, and in all


FSDP2 = "fully_shard"  # among a run's options: torch shards the model


class Case(NamedTuple):
    """Configurations of the saving and the loading run, by name."""

    saved: dict[str, Any]
    loaded: dict[str, Any]
    dtype: torch.dtype = torch.float32
    near: float = 1e-4  # of losses on another number of ranks: fp32 summation order, grown by a few steps of Adam


def begin(options: dict[str, Any], dtype: torch.dtype) -> tuple[Tiny, Optimizer]:
    model = make_model(dtype)
    fields = {name: value for name, value in options.items() if name != FSDP2}
    if FSDP2 in options and dist.is_initialized():
        fully_shard(model.layer)
        fully_shard(model)
    for module in (model.embedding, model.head):  # sharding makes new parameters, without the old ones' attributes
        module.weight.is_embedding_or_output_parameter = True
    return model, get_optimizer(OptimizerConfig(lr=3e-3, clip_grad=0.3, **fields), [model])


def state_of(model: Tiny, optimizer: Optimizer) -> dict[str, Any]:
    weights = sharded_model(model)
    return {"model": weights, "optimizer": optimizer.sharded_state_dict(weights)}


def train(model: Tiny, optimizer: Optimizer, steps: range) -> list[float]:
    """Losses of the joined batch, comparable between numbers of ranks."""
    losses = []
    for step in steps:
        model(my_batch(step) if dist.is_initialized() else joined_batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(model(joined_batch(step)).item())
    return losses


def run_and_save(case: Case, path: str) -> list[float]:
    model, optimizer = begin(case.saved, case.dtype)
    train(model, optimizer, range(BEFORE))
    save(state_of(model, optimizer), path)
    return train(model, optimizer, range(BEFORE, AFTER))


def resume(options: dict[str, Any], dtype: torch.dtype, path: str) -> list[float]:
    model, optimizer = begin(options, dtype)
    loaded = load(state_of(model, optimizer), path, dtype="cast").state
    optimizer.load_state_dict(loaded["optimizer"])
    return train(model, optimizer, range(BEFORE, AFTER))
