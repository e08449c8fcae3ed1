"""Saving and loading in torch's form: loading sets, twice equals once, precision stays, groups find their own."""

import copy
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import sharded_state
from stack_models import assert_equal, make_model, stepped, train, weights
from torch import nn

from opt_checkpoint import save
from opt_config import OptimizerConfig
from opt_stack import Optimizer, get_optimizer

ADAMW = OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_grad=0.0)
BF16 = OptimizerConfig(lr=1e-2, bf16=True)
AWARE = replace(BF16, use_precision_aware_optimizer=True)
CONFIGS = {
    "adamw": ADAMW,
    "bf16": BF16,
    **{
        name: OptimizerConfig(lr=1e-2, optimizer=name) for name in ("sgd", "lion", "muon", "muown", "soap", "soap_muon")
    },
    "remainders": replace(AWARE, exp_avg_dtype=torch.bfloat16),
    "fp16 mains": replace(AWARE, main_params_dtype=torch.float16),
}


def values(optimizer: Optimizer) -> Any:
    """The state dict with copies of its tensors."""
    return copy.deepcopy(optimizer.state_dict())


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_run_resumed_from_a_file_is_the_run_never_stopped(config: OptimizerConfig) -> None:
    unbroken, _ = stepped(config, 8)
    model, first = stepped(config, 4)
    resumed = get_optimizer(config, [model])
    resumed.load_state_dict(through_a_file(first.state_dict()))
    train(model, resumed, range(4, 8))
    assert_equal(weights(model), weights(unbroken))
    saved = values(first)
    _, other = stepped(config, 5)
    for _ in range(2):  # loading twice equals loading once
        other.load_state_dict(saved)
        assert_equal(values(other), saved)


def test_the_state_of_torchs_own_adamw_loads() -> None:
    theirs = make_model()
    ours = make_model()
    adamw = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.1)
    train(theirs, adamw, range(4))
    train(ours, torch.optim.AdamW(ours.parameters(), lr=1e-2, weight_decay=0.1), range(4))
    optimizer = get_optimizer(ADAMW, [ours], {})
    optimizer.load_state_dict(adamw.state_dict())
    train(ours, optimizer, range(4, 8))
    train(theirs, adamw, range(4, 8))
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-6, atol=1e-7)  # one rounding a step


def test_groups_are_found_by_name_and_parameters_within_them_too() -> None:
    model, optimizer = stepped(ADAMW, 3)
    saved = values(optimizer)
    assert len(saved["param_groups"]) == 2
    saved["param_groups"].reverse()
    for group in saved["param_groups"]:
        group["params"].reverse()
        group["param_names"].reverse()
    other = get_optimizer(ADAMW, [model])
    other.load_state_dict(saved)
    assert_equal(values(other), values(optimizer))


def test_hyperparameters_are_restored_under_another_config() -> None:
    _, optimizer = stepped(ADAMW, 1)
    optimizer.param_groups[0]["lr"] = 0.5
    other = get_optimizer(OptimizerConfig(lr=7e-2, weight_decay=0.3), [make_model()])
    held = other.param_groups
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["lr"] == 0.5
    assert other.param_groups is held  # schedulers hold on to the list and its dicts


def test_state_can_be_assigned_and_reset_to_zero() -> None:
    model, optimizer = stepped(ADAMW, 3)
    weight = model[0].weight
    optimizer.state[weight]["exp_avg"] = torch.full_like(weight, 0.25)
    assert (optimizer.state_dict()["state"][0]["exp_avg"] == 0.25).all()
    optimizer.state[weight]["step"] = torch.tensor(7.0)
    assert float(optimizer.state_dict()["state"][0]["step"]) == 7.0
    optimizer.state[weight] = {}
    fresh = get_optimizer(ADAMW, [make_model()])
    assert_equal(dict(optimizer.state[weight]), dict(fresh.state[fresh.param_groups[0]["params"][0]]))
    with pytest.raises(AttributeError, match="load_state_dict"):
        optimizer.state = {}
    with pytest.raises(ValueError, match="has other"):
        optimizer.state[weight]["other"] = torch.zeros(1)


@pytest.mark.parametrize("name", ["bf16", "remainders"])
def test_a_reset_of_state_keeps_the_main_values(name: str) -> None:
    model, optimizer = stepped(CONFIGS[name], 5)
    before = optimizer.state[model[0].weight]["fp32_param"].clone()
    optimizer.state[model[0].weight] = {}
    assert torch.equal(optimizer.state[model[0].weight]["fp32_param"], before)


@pytest.mark.parametrize("name", ["adamw", "bf16", "remainders"])
def test_a_kept_state_writes_nothing_but_what_is_assigned(name: str) -> None:
    """Symptom: the steps and joined main values of when it was read were written, too."""
    model, optimizer = stepped(CONFIGS[name], 2)
    kept = optimizer.state[model[0].weight]
    train(model, optimizer, range(2, 5))
    before = values(optimizer)
    kept["exp_avg"] = torch.zeros_like(kept["exp_avg"])
    assert not optimizer.state[model[0].weight]["exp_avg"].any()
    after = values(optimizer)
    del before["state"][0]["exp_avg"], after["state"][0]["exp_avg"]
    assert_equal(after, before)


def test_state_is_not_assigned_in_evaluation_mode() -> None:
    """Symptom: the parameters had the trained weights again, which were then evaluated."""
    model, optimizer = stepped(replace(BF16, ema_decay=0.5), 3)
    optimizer.eval()
    shown = weights(model)
    state = optimizer.state[model[0].weight]
    with pytest.raises(RuntimeError, match="evaluation mode"):
        optimizer.state[model[0].weight] = dict(state)
    with pytest.raises(RuntimeError, match="evaluation mode"):
        state["exp_avg"] = torch.zeros_like(state["exp_avg"])
    assert_equal(weights(model), shown)


def test_a_compiled_models_weights_are_reloaded() -> None:
    model = make_model(torch.bfloat16)
    compiled: Any = torch.compile(model)
    optimizer = get_optimizer(BF16, [compiled])
    wanted = {name: value.float() + 1e-3 for name, value in compiled.state_dict().items()}
    optimizer.reload_model_params(wanted)
    assert torch.equal(optimizer.state[model[0].weight]["fp32_param"], wanted["_orig_mod.0.weight"])


def test_a_compiled_layer_keeps_its_name_and_its_state() -> None:
    plain = make_model()
    other = make_model()
    layers: Any = other
    layers[0] = torch.compile(layers[0])
    optimizer, compiled = (get_optimizer(OptimizerConfig(lr=0.1), [model]) for model in (plain, other))
    for param in plain.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["param_names"] == compiled.state_dict()["param_groups"][0]["param_names"]
    former = copy.deepcopy(saved)  # of a version in which a compiled layer had another name
    for group in former["param_groups"]:
        group["param_names"] = [name.replace("0.", "0._orig_mod.", 1) for name in group["param_names"]]
    for state in (saved, former):
        compiled.load_state_dict(state)
        assert torch.equal(compiled.state[layers[0].weight]["exp_avg"], optimizer.state[plain[0].weight]["exp_avg"])
    compiled.reload_model_params(other.state_dict())


def test_state_has_the_names_and_memory_of_the_state_dict() -> None:
    model, optimizer = stepped(BF16, 2)
    saved = optimizer.state_dict()["state"]
    for index, param in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        assert_equal(dict(optimizer.state[param]), dict(saved[index]))
        assert optimizer.state[param]["exp_avg"].data_ptr() == saved[index]["exp_avg"].data_ptr()
    assert len(optimizer.state) == 4
    copied = copy.deepcopy(dict(optimizer.state[model[0].weight]))
    assert copied["exp_avg"].data_ptr() != optimizer.state[model[0].weight]["exp_avg"].data_ptr()


def test_an_fp32_run_goes_on_from_the_mains_of_a_16_bit_one() -> None:
    model, narrow = stepped(BF16, 3)
    wide = get_optimizer(ADAMW, [model.float()])
    wide.load_state_dict(narrow.state_dict())
    for index, param in enumerate(p for group in wide.param_groups for p in group["params"]):
        assert torch.equal(param, narrow.state_dict()["state"][index]["fp32_param"])
        assert not torch.equal(param, param.bfloat16().float())


def test_a_parameter_without_elements_is_not_missed() -> None:
    model = nn.ParameterDict({"none": nn.Parameter(torch.zeros(0, 3)), "some": nn.Parameter(torch.ones(2))})
    optimizer = get_optimizer(ADAMW, [model], {})
    model["some"].grad = torch.ones(2)
    optimizer.step()
    saved = values(optimizer)
    optimizer.load_state_dict(saved)
    assert_equal(values(optimizer), saved)


def test_16_bit_runs_refuse_rounded_fp32_values_unless_requested() -> None:
    model, wide = stepped(ADAMW, 3)
    exact = weights(model)
    narrow = get_optimizer(BF16, [model.bfloat16()])
    with pytest.raises(ValueError, match="an fp32 run saved it"):
        narrow.load_state_dict(wide.state_dict())
    narrow.load_state_dict(wide.state_dict(), main_values="parameters")
    assert torch.equal(narrow.state[model[0].weight]["fp32_param"], exact["0.weight"].bfloat16().float())
    narrow.reload_model_params(exact)
    assert torch.equal(narrow.state[model[0].weight]["fp32_param"], exact["0.weight"])


@pytest.mark.parametrize("name", ["bf16", "remainders", "fp16 mains"])
def test_main_values_equal_reloaded_parameters_exactly(name: str) -> None:
    _, optimizer = stepped(CONFIGS[name], 3)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    assert any(not torch.equal(p.float(), main) for p, main in zip(params, optimizer.get_parameters(), strict=True))
    with torch.no_grad():
        for param in params:
            param.copy_(torch.rand(param.shape))
    optimizer.reload_model_params()
    assert_equal(optimizer.get_parameters(), [param.detach().float() for param in params])


def set_rate(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.5


def load_older(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.load_state_dict(values(stepped(ADAMW, 1)[1]))


STALE = {
    "a step": lambda model, optimizer: train(model, optimizer, range(2, 3)),
    "another rate": set_rate,
    "a load": load_older,
}


@pytest.mark.parametrize("change", STALE.values(), ids=STALE)
def test_a_stale_sharded_state_is_not_saved(change: Callable[[nn.Module, Optimizer], None], tmp_path: Path) -> None:
    """The weights of the moment were saved with the step count and the rate of before: Adam resumed too far."""
    model, optimizer = stepped(ADAMW)
    state = sharded_state(model, optimizer)
    save(state, tmp_path / "before")
    change(model, optimizer)
    with pytest.raises(ValueError, match=r"call optimizer.sharded_state_dict before each save and load"):
        save(state, tmp_path / "after")
    save(sharded_state(model, optimizer), tmp_path / "again")
