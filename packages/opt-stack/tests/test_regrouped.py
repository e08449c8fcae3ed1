"""Stacks of vectors, as biases of experts, have no decay and no matrix rule, and states of earlier groups load."""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from stack_models import assert_equal
from torch import Tensor, nn

from opt_checkpoint import load, save, sharded_model
from opt_config import OptimizerConfig, ParamKey
from opt_paramgroups import get_layer_decay_overrides, get_standard_config_overrides
from opt_stack import Optimizer, get_optimizer, megatron

VECTORS = ("A_log", "experts.gate_up_proj_bias")


class Hybrid(nn.Module):
    """A matrix, a bias, biases of two experts and a parameter of Mamba's."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.A_log = nn.Parameter(torch.randn(4, 3, generator=generator).to(dtype))
        self.experts = nn.Module()
        self.experts.gate_up_proj_bias = nn.Parameter(torch.randn(2, 4, generator=generator).to(dtype))
        self.fc = nn.Linear(4, 4).to(dtype)


def config(rule: str, *, bf16: bool = False) -> OptimizerConfig:
    return OptimizerConfig(optimizer=rule, lr=1e-2, weight_decay=0.1, bf16=bf16)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
    optimizer.step()


def placed(optimizer: torch.optim.Optimizer) -> dict[str, tuple[str, float, str]]:
    """Rule, decay and group of each parameter."""
    return {
        str(id): (group["optimizer"], group["weight_decay"], group["name"])
        for group in optimizer.param_groups
        for id in group["param_ids"]
    }


@pytest.mark.parametrize("rule", ["adam", "muon"])
def test_megatrons_function_routes_stacks_of_vectors_as_megatron(rule: str) -> None:
    ours = placed(get_optimizer(config(rule), [Hybrid()]))
    theirs = placed(megatron.get_megatron_optimizer(config(rule), [Hybrid()]))
    groups = megatron._get_param_groups([Hybrid()], config(rule), None)
    for name in VECTORS:
        assert ours[name] == ours["fc.bias"]
        assert theirs[name] == theirs["fc.weight"] == (rule, 0.1, "default")
    assert {str(id) for id in groups[0]["param_ids"]} == {*VECTORS, "fc.weight"}
    assert ours["fc.weight"] == theirs["fc.weight"]
    overrides = megatron.get_standard_config_overrides(config(rule))
    given = placed(megatron.get_megatron_optimizer(config(rule), [Hybrid()], overrides))
    assert given == theirs


def saved_before(rule: str, *, bf16: bool) -> dict[str, Any]:
    """A state dict as the release before wrote it, for `Hybrid` after three steps."""
    rest = {
        "adam": "*.bias or 1-D",
        "muon": "(*.bias or 1-D) and (embedding or output or not 2-D or use_muon=False)",
    }[rule]
    common = {"lr_mult": 1.0, "is_decoupled_lr": False, "is_expert_parallel": False, "max_lr": 0.01, "min_lr": None}
    numbers: dict[str, Any] = {"adam": {"betas": (0.9, 0.99), "eps": 1e-8}, "muon": {"momentum": 0.9}}
    default = {**common, "wd_mult": 1.0, "optimizer": rule, "name": "default", "default_config": True}
    undecayed = {**common, "wd_mult": 0.0, "optimizer": "adam", "name": rest, "default_config": False}
    default |= {"lr": 0.005, "weight_decay": 0.1, **numbers[rule], "param_ids": None}
    undecayed |= {"lr": 0.005, "weight_decay": 0.0, **numbers["adam"], "param_ids": None}
    names = [*VECTORS, "fc.weight"]
    groups = [
        {**default, "params": [0, 1, 2], "param_names": names},
        {**undecayed, "params": [3], "param_names": ["fc.bias"]},
    ]
    model = Hybrid()
    state = {}
    for index, name in enumerate([*names, "fc.bias"]):
        like = model.get_parameter(name).detach()
        has_momentum = rule == "muon" and index < 3
        of_rule = ["momentum_buffer"] if has_momentum else ["exp_avg", "exp_avg_sq"]
        kept = [*of_rule, *(["fp32_param"] if bf16 else [])]
        state[index] = {"step": torch.tensor(3.0)} | {key: torch.full_like(like, 0.3 + index) for key in kept}
    return {"version": 1, "state": state, "param_groups": groups, "grad_scaler": {}, "layout": {"replicated": True}}


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rule", ["adam", "muon"])
def test_a_state_saved_with_the_former_groups_loads(rule: str, bf16: bool, caplog: pytest.LogCaptureFixture) -> None:
    """State follows the parameter if its rule is the same; another rule starts anew, from the saved main values."""
    model = Hybrid(torch.bfloat16 if bf16 else torch.float32)
    optimizer = get_optimizer(config(rule, bf16=bf16), [model])
    saved = saved_before(rule, bf16=bf16)
    before = copy.deepcopy(saved)
    optimizer.load_state_dict(saved)
    assert_equal(saved, before)
    default, rest = optimizer.param_groups
    assert (default["lr"], default["weight_decay"], rest["lr"], rest["weight_decay"]) == (0.005, 0.1, 0.005, 0.0)
    assert rest["betas"] == (0.9, 0.99)
    for index, name in enumerate(VECTORS):
        state = optimizer.state[model.get_parameter(name)]
        if rule == "adam":
            assert_equal(dict(state), saved["state"][index])
        else:
            assert (float(state["step"]), float(state["exp_avg"].abs().sum())) == (0.0, 0.0)
        if bf16:
            assert_equal(state["fp32_param"], saved["state"][index]["fp32_param"])
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert warnings[0].startswith("2 parameters changed groups since this state was saved, because their names ")
    assert "'A_log', 'experts.gate_up_proj_bias'" in warnings[0]
    caplog.clear()
    step(model, optimizer, 0)
    optimizer.load_state_dict(optimizer.state_dict())  # of the present groups: nothing is said
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize(
    ("pattern", "former"),
    [("*A*", "(*.bias or 1-D) and *A*"), ("[f]*", "(*.bias or 1-D) and [f]*"), ("f*", "(*.bias or 1-D) and f*")],
)
def test_former_names_of_groups_with_several_keys_load(pattern: str, former: str) -> None:
    """A name has its keys in their order, which their new words changed."""
    overrides = {**get_standard_config_overrides(config("adam")), ParamKey(name=pattern): {"lr_mult": 0.5}}
    optimizer = get_optimizer(config("adam"), [Hybrid()], overrides)
    saved = optimizer.state_dict()
    names = [group["name"] for group in saved["param_groups"]]
    [name] = [name for name in names if " and " in name]
    for group in saved["param_groups"]:
        group["lr"] = 0.25 if group["name"] == name else group["lr"]
        if "bias" in group["name"]:
            group["name"] = former if group["name"] == name else "*.bias or 1-D"
    optimizer.load_state_dict(saved)
    assert [group["name"] for group in optimizer.param_groups] == names
    assert [group["name"] for group in optimizer.param_groups if group["lr"] == 0.25] == [name]


Build = Callable[..., Optimizer]
DIRECTIONS: Mapping[str, tuple[Build, Build]] = {
    "from the former routing": (megatron.get_megatron_optimizer, get_optimizer),
    "to Megatron-Core's routing": (get_optimizer, megatron.get_megatron_optimizer),
}


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rule", ["adam", "muon"])
@pytest.mark.parametrize(("first", "second"), DIRECTIONS.values(), ids=DIRECTIONS)
def test_a_checkpoint_of_the_other_routing_loads(
    first: Build, second: Build, rule: str, bf16: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Hybrid(torch.bfloat16 if bf16 else torch.float32)
    saving = first(config(rule, bf16=bf16), [model])
    for seed in range(3):
        step(model, saving, seed)
    for group in saving.param_groups:
        group["lr"] = 0.004
    described = sharded_model(model)
    save({"model": described, "optimizer": saving.sharded_state_dict(described)}, tmp_path / "step")
    other = Hybrid(torch.bfloat16 if bf16 else torch.float32)
    loading = second(config(rule, bf16=bf16), [other])
    routed = placed(loading)
    described = sharded_model(other)
    loaded = load({"model": described, "optimizer": loading.sharded_state_dict(described)}, tmp_path / "step")
    caplog.clear()
    loading.load_state_dict(loaded.state["optimizer"])
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "'A_log', 'experts.gate_up_proj_bias'" in warning
    assert placed(loading) == routed
    assert {group["lr"] for group in loading.param_groups} == {0.004}
    for name in (*VECTORS, "fc.weight"):
        then = saving.state[model.get_parameter(name)]
        now = loading.state[other.get_parameter(name)]
        if rule == "adam" or name == "fc.weight":
            assert_equal(dict(now), dict(then))
        else:
            assert float(now["step"]) == 0.0
            assert_equal(now.get("fp32_param"), then.get("fp32_param"))
        torch.testing.assert_close(other.get_parameter(name), model.get_parameter(name), rtol=0, atol=0)


class Bert(nn.Module):
    """Two layers with BERT's names."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Module()
        self.encoder.layer = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))


@pytest.mark.parametrize("is_sharded", [False, True], ids=["state_dict", "sharded"])
def test_state_without_layer_decay_loads_where_layers_are_found(
    is_sharded: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Bert()
    saving = get_optimizer(config("adam"), [model], {})
    step(model, saving, 0)
    saving.param_groups[0]["lr"] = 0.005  # half of the peak
    loading = get_optimizer(config("adam"), [model], get_layer_decay_overrides([model], 0.5))
    saved: Any = copy.deepcopy(saving.state_dict())
    if is_sharded:
        described = sharded_model(model)
        save({"optimizer": saving.sharded_state_dict(described)}, tmp_path / "step")
        saved = load({"optimizer": loading.sharded_state_dict(described)}, tmp_path / "step").state["optimizer"]
    caplog.clear()
    loading.load_state_dict(saved)
    rates = {str(id): group["lr"] for group in loading.param_groups for id in group["param_ids"]}
    assert rates["encoder.layer.0.weight"] == pytest.approx(0.25 * 0.005)
    assert rates["encoder.layer.1.weight"] == pytest.approx(0.5 * 0.005)
    weight: Tensor = model.encoder.layer[1].weight  # type: ignore[index, union-attr, assignment]
    assert_equal(dict(loading.state[weight]), dict(saving.state[weight]))
    assert len([record for record in caplog.records if "changed groups" in record.getMessage()]) == 1


def test_params_in_another_group_for_another_reason_are_refused() -> None:
    optimizer = get_optimizer(config("adam"), [Hybrid()])
    saved = saved_before("adam", bf16=False)
    default, rest = saved["param_groups"]
    default["params"].remove(2)
    default["param_names"].remove("fc.weight")
    rest["params"].append(2)
    rest["param_names"].append("fc.weight")
    with pytest.raises(ValueError, match="group 'default' has 1 parameters, but the saved group 0"):
        optimizer.load_state_dict(saved)
