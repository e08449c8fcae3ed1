"""Numbers of loaded groups that no run could have saved."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from opt_checkpoint import load, save, sharded_model
from opt_config import OptimizerConfig
from opt_stack import Optimizer, get_optimizer

IMPOSSIBLE = [
    ("adam", "lr", math.nan), ("adam", "lr", -1.0), ("adam", "lr", math.inf), ("adam", "betas", (0.9, 2.0)),
    ("adam", "eps", math.nan), ("lion", "betas", (math.nan, 0.9)), ("muon", "momentum", math.nan),
    ("muon", "weight_decay", -0.1), ("soap", "betas", (0.9, 1.0)), ("sgd", "weight_decay", math.inf),
]  # fmt: skip


def trained(rule: str) -> tuple[nn.Module, Optimizer]:
    model = nn.Linear(4, 4, bias=False)
    optimizer = get_optimizer(OptimizerConfig(lr=0.01, optimizer=rule), [model])
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def values_of(model: nn.Module, optimizer: Optimizer) -> Any:
    state = optimizer.state_dict()
    return copy.deepcopy([model.state_dict(), state["state"], state["param_groups"]])


@pytest.mark.parametrize(("rule", "key", "value"), IMPOSSIBLE)
def test_impossible_numbers_of_a_state_dict_are_refused_and_nothing_changes(rule: str, key: str, value: Any) -> None:
    """Symptom: a damaged learning rate was taken, and the next step made NaN of every weight."""
    model, optimizer = trained(rule)
    before = values_of(model, optimizer)
    damaged = copy.deepcopy(optimizer.state_dict())
    for group in damaged["param_groups"]:
        group[key] = value
    with pytest.raises(ValueError, match=f"group .*{key}="):
        optimizer.load_state_dict(damaged)
    assert str(values_of(model, optimizer)) == str(before)


def test_impossible_numbers_of_a_checkpoint_are_refused_unless_overridden(tmp_path: Path) -> None:
    model, optimizer = trained("adam")
    optimizer.param_groups[0]["lr"] = -1.0
    weights = sharded_model(model)
    save({"model": weights, "optimizer": optimizer.sharded_state_dict(weights)}, str(tmp_path / "saved"))
    other_model, other = trained("adam")
    weights = sharded_model(other_model)
    state = {"model": weights, "optimizer": other.sharded_state_dict(weights)}
    loaded = load(state, str(tmp_path / "saved")).state["optimizer"]
    with pytest.raises(ValueError, match=r"group .*lr=-1.0"):
        other.load_state_dict(loaded)
    assert other.param_groups[0]["lr"] == 0.01
    other.load_state_dict(loaded, override={"lr": 0.02})
    assert other.param_groups[0]["lr"] == 0.02
