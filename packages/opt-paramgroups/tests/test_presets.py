"""Presets, as in Megatron-Core: weight decay, decoupled rates, matrix rules, layer decay."""

import pytest
from models import Model, mark
from torch import nn

from opt_config import ConfigError, OptimizerConfig
from opt_paramgroups import (
    get_layer_decay_overrides,
    get_matrix_rule_overrides,
    get_param_groups,
)


def entry_by_name(model, config, overrides, entry):
    """The entry that each parameter's group has, by the parameter's name."""
    groups = get_param_groups([model], config, overrides)
    return {id.name: group.get(entry) for group in groups for id in group["param_ids"]}


def test_biases_and_vectors_are_spared_the_weight_decay():
    model = Model(num_layers=1)
    mults = entry_by_name(model, OptimizerConfig(lr=1.0), None, "wd_mult")
    spared = {name for name, mult in mults.items() if mult == 0.0}
    assert spared == {name for name, param in model.named_parameters() if name.endswith(".bias") or param.dim() == 1}
    assert set(mults.values()) == {0.0, 1.0}


@pytest.mark.parametrize("applies", [False, True])
def test_a_matrix_called_bias_is_spared_and_qk_layernorm_is_decayed_only_if_requested(applies):
    config = OptimizerConfig(lr=1.0, apply_wd_to_qk_layernorm=applies)
    model = nn.ModuleDict({"a": nn.Module()})
    model["a"].register_parameter("bias", nn.Parameter(nn.Linear(2, 2).weight.detach()))
    assert entry_by_name(model, config, None, "wd_mult") == {"a.bias": 0.0}
    mults = entry_by_name(Model(num_layers=1), config, None, "wd_mult")
    of_qk = {mult for name, mult in mults.items() if "q_layernorm." in name or "k_layernorm." in name}
    assert of_qk == {1.0 if applies else 0.0}
    assert mults["layers.0.norm.weight"] == mults["layers.0.attention.linear_qkv.bias"] == 0.0


@pytest.mark.parametrize(
    ("decoupled_min_lr", "expected"), [(None, 1e-5), (1e-6, 1e-6)], ids=["common floor", "floor of its own"]
)
def test_decoupled_lr_moves_embedding_and_output_only(decoupled_min_lr, expected):
    config = OptimizerConfig(lr=1e-2, min_lr=1e-5, decoupled_lr=1e-3, decoupled_min_lr=decoupled_min_lr)
    for entry, own, common in (("max_lr", 1e-3, 1e-2), ("min_lr", expected, 1e-5), ("is_decoupled_lr", True, False)):
        found = entry_by_name(Model(num_layers=1), config, None, entry)
        assert {name for name, value in found.items() if value == own} >= {"embedding.weight", "output.weight"}
        assert found["layers.0.attention.linear_qkv.weight"] == common


def test_decoupled_lr_that_nothing_takes_is_refused():
    with pytest.raises(ConfigError, match=r"config_overrides\[embedding or output\]: matches no parameter"):
        get_param_groups([nn.Linear(2, 2)], OptimizerConfig(lr=1.0, decoupled_lr=0.5), None)


MATRICES = {"layers.0.attention.linear_qkv.weight", "layers.0.attention.linear_proj.weight"}


def test_parameters_other_than_hidden_matrices_use_the_scalar_optimizer():
    for optimizer, given, scalar in (
        ("muon", "adam", "adam"), ("muon", "lion", "lion"), ("adaptive_muon", "lion", "lion"), ("soap", "lion", "adam"),
    ):  # fmt: skip
        config = OptimizerConfig(optimizer=optimizer, muon_scalar_optimizer=given)
        rules = entry_by_name(Model(num_layers=1), config, get_matrix_rule_overrides(config), "optimizer")
        assert {name for name, rule in rules.items() if rule == optimizer} == MATRICES
        assert set(rules.values()) == {optimizer, scalar}


def test_use_muon_has_an_effect_with_muon_only():
    for optimizer, expected in (("muon", "adam"), ("soap", "soap")):
        model, config = Model(num_layers=1), OptimizerConfig(optimizer=optimizer)
        mark(model.layers[0].attention.linear_proj.weight, use_muon=False)
        rules = entry_by_name(model, config, get_matrix_rule_overrides(config), "optimizer")
        assert rules["layers.0.attention.linear_proj.weight"] == expected


def test_layer_decay_shrinks_rates_towards_the_input():
    model = Model(num_layers=3)
    config = OptimizerConfig(lr=1.0, min_lr=0.5)
    overrides = get_layer_decay_overrides([model], 0.5)
    rates = entry_by_name(model, config, overrides, "max_lr")
    assert rates["embedding.weight"] == 0.5**4
    assert [rates[f"layers.{i}.norm.weight"] for i in range(3)] == [0.5**3, 0.5**2, 0.5]
    assert rates["output.weight"] == 1.0
    assert entry_by_name(model, config, overrides, "min_lr")["layers.2.norm.weight"] == 0.25
    of_nine = get_layer_decay_overrides([model], 0.5, num_layers=9)  # of a stage that holds the first three
    assert entry_by_name(model, config, of_nine, "max_lr")["layers.0.norm.weight"] == 0.5**9


def test_bad_layer_decay_is_refused():
    for model, options, message in (
        (Model(num_layers=2), {"decay": 0.0}, "decay=0.0: must be in (0, 1]"),
        (Model(num_layers=2), {"decay": 0.5, "num_layers": 1}, "num_layers=1: must be at least 2, the depth of a"),
        (nn.Linear(2, 2), {"decay": 0.5, "num_layers": -1}, "num_layers=-1: must be at least 0"),
    ):
        with pytest.raises(ConfigError) as caught:
            get_layer_decay_overrides([model], **options)
        assert str(caught.value).startswith(f"get_layer_decay_overrides: {message}")
