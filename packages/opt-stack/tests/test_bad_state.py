"""A state dict that does not fit, or holds impossible numbers, is refused whole, before anything has changed."""

import copy
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from stack_models import assert_equal, stepped

from opt_config import OptimizerConfig
from opt_stack import Optimizer

FP16 = OptimizerConfig(lr=1e-2, fp16=True, initial_loss_scale=8.0)
REMOVED = object()  # in place of an entry


def built(config: OptimizerConfig = FP16) -> Optimizer:
    return stepped(config, 1)[1]


def assert_refused(optimizer: Optimizer, state_dict: dict[str, Any], message: str, **options: Any) -> None:
    """And nothing has changed."""
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state_dict, **options)
    assert_equal(copy.deepcopy(optimizer.state_dict()), before)


def edited(path: Sequence[str | int], entries: Mapping[Any, Any]) -> dict[str, Any]:
    """A state dict that would change every number, with other entries in the part that is found by `path`."""
    state_dict = copy.deepcopy(built().state_dict())
    for state in state_dict["state"].values():
        for name in ("exp_avg", "exp_avg_sq", "fp32_param"):
            state[name].add_(1.0)
    part: Any = state_dict
    for key in path:
        part = part[key]
    for key, value in entries.items():
        if value is REMOVED:
            del part[key]
        else:
            part[key] = value
    return state_dict


GROUP = ("param_groups", 0)
BROKEN: dict[str, tuple[Sequence[str | int], Mapping[Any, Any], str]] = {  # the part of a state dict, other entries
    "a scaler without its counts": ((), {"grad_scaler": {"scale": 2.0}}, "grad_scaler="),
    "a loss scale that is not a number": (("grad_scaler",), {"scale": math.nan}, "scale=nan: a loss scale"),
    "a loss scale of zero": (("grad_scaler",), {"scale": 0.0}, "scale=0.0: a loss scale"),
    "a learning rate that is a word": (GROUP, {"lr": "abc"}, "lr='abc'"),
    "a version to come": ((), {"version": 99}, "version 99"),
    "a parameter without state": (("state",), {0: REMOVED}, "but not of"),
    "state that nobody keeps": (("state", 0), {"junk": torch.ones(1)}, "has junk"),
    "no state at all": ((), {"state": REMOVED}, "needs 'state' and 'param_groups'"),
    "another number of groups": (("param_groups",), {-1: REMOVED}, "has 1 parameter groups, but this optimizer has 2"),
    "another group": (GROUP, {"name": "x"}, "state_dict has no group 'default'"),
    "a state that is not there": (("state", 0), {"exp_avg_sq": REMOVED}, "lacks exp_avg_sq"),
    "a state of another shape": (("state", 0), {"exp_avg": torch.zeros(2)}, r"has shape \(2,\)"),
    "another layout": ((), {"layout": "rank 0 of another"}, "which loads on any layout"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_state_dict_is_refused_and_changes_nothing(case: str) -> None:
    path, entries, message = BROKEN[case]
    assert_refused(built(), edited(path, entries), message)


@pytest.mark.parametrize("scale", [0.5, 2.0**-40, 2.0**40])
def test_a_loss_scale_of_any_size_is_loaded(scale: float) -> None:
    optimizer = built()
    optimizer.load_state_dict(edited(("grad_scaler",), {"scale": scale}))
    assert optimizer.get_loss_scale().item() == scale


def test_a_constant_loss_scale_ignores_a_saved_one_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = built(OptimizerConfig(lr=1e-2, fp16=True, loss_scale=2.0))
    with caplog.at_level("INFO"):
        optimizer.load_state_dict(built().state_dict())
    assert optimizer.get_loss_scale().item() == 2.0
    assert "the saved loss scale is ignored: this optimizer has a constant one" in caplog.messages


@pytest.mark.parametrize(("saved_by", "loaded_by"), [("laprop", "adam"), ("signum", "sgd"), ("radam", "nadam")])
def test_state_of_another_rule_with_the_same_names_is_refused(saved_by: str, loaded_by: str) -> None:
    """LaProp's moments were loaded into Adam, whose group was then called LaProp's in the next checkpoint."""
    saved, optimizer = (
        built(OptimizerConfig(optimizer=name, lr=1e-2, sgd_momentum=0.9)) for name in (saved_by, loaded_by)
    )
    assert_refused(optimizer, saved.state_dict(), f"saved by optimizer='{saved_by}', .* optimizer='{loaded_by}'")


def test_intact_state_loads_unless_main_values_is_misspelt() -> None:
    """It was taken for "parameters", which starts a 16-bit run from rounded values."""
    optimizer = built()
    state_dict = edited(("grad_scaler",), {"scale": 4.0})
    assert_refused(optimizer, state_dict, "main_values='paramters'", main_values="paramters")
    optimizer.load_state_dict(state_dict)
    for part in ("state", "grad_scaler"):
        assert_equal(optimizer.state_dict()[part], state_dict[part])


def test_a_loaded_tensor_is_the_optimizers_own() -> None:
    saved = built().state_dict()
    saved["param_groups"][0]["lr"] = torch.tensor(0.3)
    optimizer = built()
    optimizer.load_state_dict(saved)
    optimizer.param_groups[0]["lr"].fill_(0.1)
    assert saved["param_groups"][0]["lr"].item() == pytest.approx(0.3)


def test_torchs_hooks_run() -> None:
    optimizer = built()
    seen = []
    optimizer.register_state_dict_pre_hook(lambda opt: seen.append("save"))
    optimizer.register_state_dict_post_hook(lambda opt, state_dict: {**state_dict, "note": 1})
    optimizer.register_load_state_dict_pre_hook(lambda opt, state_dict: seen.append("load"))
    optimizer.register_load_state_dict_post_hook(lambda opt: seen.append("loaded"))
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    assert (saved["note"], seen) == (1, ["save", "load", "loaded"])


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_is_not_copied_or_pickled_by_halves(copied: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match="load this one's state_dict"):
        copied(built())


IMPOSSIBLE = [
    ("adam", "lr", math.nan), ("adam", "lr", -1.0), ("adam", "lr", math.inf), ("adam", "betas", (0.9, 2.0)),
    ("adam", "eps", math.nan), ("lion", "betas", (math.nan, 0.9)), ("muon", "momentum", math.nan),
    ("muon", "lr", -0.5), ("muon", "weight_decay", -0.1), ("soap", "betas", (0.9, 1.0)),
    ("sgd", "weight_decay", math.inf),
]  # fmt: skip


def test_impossible_numbers_in_a_state_dict_change_nothing() -> None:
    """Symptom: a damaged learning rate was taken, and the next step made NaN of every weight."""
    for rule, key, value in IMPOSSIBLE:
        optimizer = built(OptimizerConfig(lr=0.01, optimizer=rule))
        damaged = copy.deepcopy(optimizer.state_dict())
        next(group for group in damaged["param_groups"] if group["optimizer"] == rule)[key] = value
        assert_refused(optimizer, damaged, f"group .*{key}=")
