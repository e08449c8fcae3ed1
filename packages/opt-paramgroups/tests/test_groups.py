"""Parameter groups: each parameter once, overrides merged, names that no hyper-parameter changes."""

import copy
import dataclasses

import pytest
from grouped import BIAS, CONFIG, VECTOR, groups_of, names_in
from models import Experts, Model
from torch import nn

from opt_config import ConfigError, OptimizerConfig, ParamKey
from opt_paramgroups import ParamId, get_param_groups, parameters_by_id


def test_a_group_starts_at_the_configured_numbers():
    (group,) = get_param_groups([nn.Linear(3, 5)], CONFIG, {})
    assert {entry: value for entry, value in group.items() if entry not in ("params", "param_ids")} == {
        "name": "default",
        "optimizer": "adam",
        "is_expert_parallel": False,
        "default_config": True,
        "is_decoupled_lr": False,
        "wd_mult": 1.0,
        "lr_mult": 1.0,
        "max_lr": 1e-2,
        "min_lr": 1e-4,
        "lr": 1e-2,
        "weight_decay": 0.1,
    }


def test_every_trainable_parameter_is_in_exactly_one_group():
    model = Model()
    for overrides in (None, {}, {BIAS: {"wd_mult": 0.0}, ParamKey(name="layers.0.*"): {"max_lr": 1.0}}):
        groups = get_param_groups([model], CONFIG, overrides)
        found = [param for group in groups for param in group["params"]]
        assert len(found) == len(set(found)) == len(list(model.parameters()))
        assert set(found) == set(model.parameters())
        by_id = parameters_by_id([model])
        for group in groups:
            assert all(by_id[id] is param for id, param in zip(group["param_ids"], group["params"], strict=True))


def test_the_order_of_keys_and_entries_does_not_matter():
    one = {BIAS: {"wd_mult": 0.0, "max_lr": 1.0}, VECTOR: {"max_lr": 1.0}}
    other = {VECTOR: {"max_lr": 1.0}, BIAS: {"max_lr": 1.0, "wd_mult": 0.0}}
    model = Model()
    assert get_param_groups([model], CONFIG, one) == get_param_groups([model], CONFIG, other)


def test_contradicting_keys_are_refused_by_name():
    with pytest.raises(ConfigError) as caught:
        get_param_groups([Experts()], CONFIG, {BIAS: {"wd_mult": 0.0}, VECTOR: {"wd_mult": 0.5}})
    assert str(caught.value) == (
        "parameter 'router.bias': key '*.bias' sets 'wd_mult' to 0.0, key '1-D' to 0.5; set it in one of them "
        "only, or let them match different parameters"
    )


def test_experts_are_apart_from_dense_parameters():
    groups = groups_of(Experts(), {BIAS: {"wd_mult": 0.0}})
    assert list(groups) == ["default", "default (experts)", "*.bias", "*.bias (experts)"]
    assert [group["is_expert_parallel"] for group in groups.values()] == [False, True, False, True]
    assert names_in(groups["*.bias (experts)"]) == ["experts.0.bias", "experts.1.bias"]
    assert [group["default_config"] for group in groups.values()] == [True, True, False, False]


def test_a_parameter_tied_over_chunks_is_in_one_group():
    first = nn.Linear(3, 3, bias=False)
    second = nn.Linear(3, 3)
    second.weight = first.weight
    (group,) = get_param_groups([first, second], CONFIG, {})
    assert group["param_ids"] == [ParamId(0, "weight"), ParamId(1, "bias")]
    second.bias.requires_grad_(False)
    (group,) = get_param_groups([first, second], CONFIG, {})
    assert group["param_ids"] == [ParamId(0, "weight")]


def test_the_callers_arguments_are_left_as_they_were():
    model = Model()
    overrides = {BIAS: {"wd_mult": 0.0}, VECTOR: dataclasses.replace(CONFIG, lr=1.0)}
    before = copy.deepcopy(overrides)
    config_before = copy.deepcopy(CONFIG)
    groups = get_param_groups([model], CONFIG, overrides)
    groups[1]["wd_mult"] = 7.0
    assert overrides == before
    assert config_before == CONFIG


def test_a_name_follows_from_the_keys_and_not_from_the_numbers():
    one = {BIAS: {"wd_mult": 0.0}, ParamKey(attr="is_embedding_or_output_parameter"): {"max_lr": 1e-3}}
    other = {BIAS: {"wd_mult": 0.25}, ParamKey(attr="is_embedding_or_output_parameter"): {"max_lr": 7e-3}}
    assert list(groups_of(Model(), one)) == list(groups_of(Model(), other, OptimizerConfig(lr=3.0)))


def test_a_module_with_siblings_is_not_taken_for_a_wrapper():
    model = nn.ModuleDict({"module": nn.Linear(2, 2, bias=False), "head": nn.Linear(2, 2, bias=False)})
    assert [id.name for id in parameters_by_id([model])] == ["module.weight", "head.weight"]
