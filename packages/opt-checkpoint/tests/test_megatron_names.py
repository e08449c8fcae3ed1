"""Megatron-Core's module names: all there, under its signatures and defaults, and the very objects of this package."""

from __future__ import annotations

import importlib
import inspect
import logging

import pytest
import torch
from torch import nn

import opt_checkpoint

# Parameters that may be given by position, with their defaults, as `core.dist_checkpointing.optimizer` documents them.
OPTIMIZER = {
    "get_optim_param_to_id_map": "(optim_params_iter)",
    "get_param_id_to_sharded_param_map": "(model_sharded_state_dict, optim_params_iter)",
    "make_sharded_optimizer_tensor": "(model_param, optim_param, prefix)",
    "optim_state_to_sharding_state": "(optim_state_dict, id_to_sharded_param_map, exclude_keys=())",
}
HINT = " Make sure state dict contains original torch.nn.Parameters (not pure torch.Tensors) by passing `kee"
MODULES = ("core", "mapping", "optimizer", "utils", "validation")


def named(module: str) -> object:
    return importlib.import_module(f"opt_checkpoint.dist_checkpointing.{module}")


@pytest.mark.parametrize("name", OPTIMIZER)
def test_the_four_functions_have_the_documented_signatures(name: str) -> None:
    signature = inspect.signature(getattr(named("optimizer"), name))
    positional = [p.replace(annotation=p.empty) for p in signature.parameters.values() if p.kind is not p.KEYWORD_ONLY]
    assert str(inspect.Signature(positional)) == OPTIMIZER[name]


def test_the_hint_and_the_logger_are_there() -> None:
    assert named("optimizer").KEEP_VARS_HINT.startswith(HINT)
    assert isinstance(named("optimizer").logger, logging.Logger)


@pytest.mark.parametrize("module", MODULES)
def test_every_name_is_the_packages_own(module: str) -> None:
    """Not a second class of the same name, which `isinstance` would tell from the first."""
    found = named(module)
    for name in found.__all__:
        assert getattr(opt_checkpoint, name, getattr(found, name)) is getattr(found, name)


def test_code_for_megatron_core_runs_after_changing_its_imports() -> None:
    from opt_checkpoint.dist_checkpointing import ShardedTensor
    from opt_checkpoint.dist_checkpointing.core import CheckpointingException
    from opt_checkpoint.dist_checkpointing.optimizer import (
        get_param_id_to_sharded_param_map,
        optim_state_to_sharding_state,
    )

    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    sharded = {
        name: ShardedTensor.from_rank_offsets(f"layer.{name}", param, (0, 0, 1))
        for name, param in model.state_dict(keep_vars=True).items()
    }
    state = optimizer.state_dict()
    optim_state_to_sharding_state(state, get_param_id_to_sharded_param_map(sharded, model.parameters()), "step")
    assert {entry.key for entry in state["state"][0].values()} == {
        "optimizer.state.exp_avg.layer.weight",
        "optimizer.state.exp_avg_sq.layer.weight",
    }
    with pytest.raises(CheckpointingException, match="keep_vars=True"):
        get_param_id_to_sharded_param_map(
            {"w": ShardedTensor.from_rank_offsets("w", torch.ones(1))}, model.parameters()
        )
