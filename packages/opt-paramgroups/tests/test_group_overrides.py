"""Overrides of groups: what may be set, what is refused and what is warned of."""

import dataclasses

import pytest
import torch
from grouped import BIAS, CONFIG, VECTOR, groups_of, names_in
from models import Experts, Model
from torch import nn

from opt_config import ConfigError, OptimizerConfig, ParamKey, ParamPredicate, ParamWithNamePredicate
from opt_paramgroups import describe, get_param_groups, get_standard_config_overrides


def test_none_means_standard_overrides_and_an_empty_dict_none():
    model = Model()
    standard = get_param_groups([model], CONFIG, None)
    spelt_out = get_param_groups([model], CONFIG, get_standard_config_overrides(CONFIG))
    assert [group["param_ids"] for group in standard] == [group["param_ids"] for group in spelt_out]
    assert {group["wd_mult"] for group in standard} == {0.0, 1.0}
    assert len(get_param_groups([model], CONFIG, {})) == 1


def test_overrides_of_all_matching_keys_are_merged():
    overrides = {BIAS: {"wd_mult": 0.0}, VECTOR: {"max_lr": 1.0, "eps": 1e-6}}
    groups = groups_of(Model(num_layers=1), overrides)
    assert list(groups) == ["default", "*.bias and 1-D", "1-D"]
    both = groups["*.bias and 1-D"]
    expected = {"wd_mult": 0.0, "max_lr": 1.0, "lr": 1.0, "eps": 1e-6, "weight_decay": 0.0}
    assert {entry: both[entry] for entry in expected} == expected
    assert all(name.endswith("norm.weight") for name in names_in(groups["1-D"]))
    assert "eps" not in groups["default"]


def test_keys_that_lead_to_one_override_share_a_group():
    overrides = {BIAS: {"wd_mult": 0.0}, ParamKey(name="output.weight"): {"wd_mult": 0.0}}
    groups = groups_of(Model(num_layers=1), overrides)
    assert list(groups) == ["default", "*.bias, output.weight"]


# --- overrides that are configurations ----------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"lr": 0.5, "min_lr": 0.1}, {"max_lr": 0.5, "min_lr": 0.1, "lr": 0.5}),
        ({"weight_decay": 0.3}, {"start_wd": 0.3, "end_wd": 0.3, "weight_decay": 0.3}),
        ({"adam_beta2": 0.95}, {"betas": (0.9, 0.95)}),
        ({"adam_eps": 1e-6}, {"eps": 1e-6}),
        ({"optimizer": "sgd", "sgd_momentum": 0.5}, {"optimizer": "sgd", "momentum": 0.5}),
        ({"optimizer": "lion", "lion_beta1": 0.5}, {"optimizer": "lion", "betas": (0.5, 0.98)}),
        ({"optimizer": "muon", "muon_momentum": 0.5}, {"optimizer": "muon", "momentum": 0.5}),
    ],
)
def test_of_a_configuration_what_differs_is_the_override(changes, expected):
    group = groups_of(Model(), {BIAS: dataclasses.replace(CONFIG, **changes)})["*.bias"]
    assert {entry: group[entry] for entry in expected} == expected


def test_unset_rates_of_an_override_change_nothing():
    assert list(groups_of(Model(), {BIAS: dataclasses.replace(CONFIG)})) == ["default"]
    override = OptimizerConfig(weight_decay=0.1, adam_eps=1e-6)
    assert groups_of(Model(), {BIAS: override})["*.bias"]["max_lr"] == CONFIG.lr


# --- refusals -----------------------------------------------------------------------------


def different(**changes):
    return {BIAS: dataclasses.replace(CONFIG, **changes)}


# how the message begins, after "config_overrides"
REFUSED = [
    ({"*.bias": {"wd_mult": 0.0}}, ": '*.bias': must be a ParamKey; for a pattern of names, ParamKey(name=...)"),
    ({BIAS: 0.0}, "[*.bias]: 0.0: must be a ParamGroupOverride (a dict) or an OptimizerConfig"),
    ({BIAS: {"lr": 1e-3}}, "[*.bias]: lr=0.001: may not be set: the schedule writes it; set max_lr, min_lr or lr_mult"),
    ({BIAS: {"weight_decay": 0}}, "[*.bias]: weight_decay=0: may not be set: the schedule writes it; set wd_mult, or"),
    ({BIAS: {"max_lr": -1}}, "[*.bias]: max_lr=-1: must be at least 0 and finite"),
    ({BIAS: {"max_lr": 10**400}}, f"[*.bias]: max_lr={10**400}: no float is as large; pass a smaller number"),
    ({BIAS: {"wd_mult": "0"}}, "[*.bias]: wd_mult='0': must be at least 0 and finite"),
    ({BIAS: {"betas": (0.9, 1.5)}}, "[*.bias]: betas=(0.9, 1.5): must be a tuple of numbers in [0, 1)"),
    ({BIAS: {"options": {"a": 1}}}, "[*.bias]: options={'a': 1}: must be a number, a string or a tuple of these: par"),
    # A misspelt entry was put into the group, and every bias decayed.
    ({BIAS: {"wd_mul": 0}}, "[*.bias]: wd_mul=0: unknown entry; nothing reads it. Allowed are betas, clip_grad, end_w"),
    ({BIAS: {"wd_mul": None}}, "[*.bias]: wd_mul=None: unknown entry"),
    ({BIAS: {"optimizer": torch.optim.SGD}}, f"[*.bias]: optimizer={torch.optim.SGD!r}: must be the name of a rule"),
    (different(clip_grad=2.0), "[*.bias]: clip_grad=2.0 differs from 1.0 in the main configuration; an override with"),
    (different(optimizer="sgd", adam_eps=1.0), "[*.bias]: adam_eps=1.0 differs from 1e-08 in the main configuration"),
    (
        {ParamKey(name="*.biass"): {"wd_mult": 0.0}, ParamKey(attr="is_embeding_parameter"): {"max_lr": 1.0}},
        "[*.biass]: matches no parameter. Did you mean *.bias?\nconfig_overrides[is_embeding_parameter]: matches no "
        "parameter. Did you mean is_embedding_parameter or is_embedding_or_output_parameter?\nCorrect or drop the key",
    ),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_bad_override_is_refused_with_its_message(overrides, message):
    with pytest.raises(ConfigError) as caught:
        get_param_groups([Model()], CONFIG, overrides)
    assert str(caught.value).startswith(f"config_overrides{message}")


def test_values_that_are_not_equal_to_themselves_are_refused():
    """A NaN of two keys was reported as a conflict of a key with itself; a tensor of two keys as an ambiguous bool."""
    for value in (float("nan"), torch.ones(2), torch.tensor(1.0)):
        overrides = {BIAS: {"mine": value}, ParamKey(name="output.*"): {"mine": value}}
        with pytest.raises(
            ConfigError, match=r"config_overrides\[\*\.bias\]: mine=.*: must be a number, a string or a"
        ):
            get_param_groups([Model()], CONFIG, overrides, extra_group_keys=("mine",))


def test_a_lazy_parameter_is_refused_by_its_name():
    with pytest.raises(ConfigError, match=r"^parameter '0\.weight' is uninitialized: .*run one forward pass"):
        get_param_groups([nn.Sequential(nn.LazyLinear(3))], CONFIG, None)


def test_entries_that_something_else_reads_may_be_set():
    for entry, extra in (("role", ("role",)), ("role", None), ("amsgrad", ())):
        groups = groups_of(Model(), {BIAS: {entry: True}}, extra_group_keys=extra)
        assert [group.get(entry) for group in groups.values()] == [None, True]


def test_a_key_of_frozen_parameters_says_that_they_are_frozen(caplog):
    # The answer was "matches no parameter. Did you mean ...", with the very name among the parameters.
    model = Model()
    model.embedding.requires_grad_(False)
    groups = groups_of(model, {ParamKey(name="embedding.weight"): {"max_lr": 1.0}})
    assert list(groups) == ["default"]
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == (
        "config_overrides[embedding.weight]: matches frozen parameters only, such as 'embedding.weight' "
        "(requires_grad=False), so it has no effect; unfreeze them before the optimizer is built, or drop the key"
    )


def test_keys_that_are_not_warned_of(caplog):
    model = Model()
    model.embedding.requires_grad_(False)
    groups_of(model, {ParamKey(name="*.weight"): {"max_lr": 1.0}})  # matches trainable parameters too
    assert list(groups_of(Model(), {ParamKey(name="*.adapter"): {"wd_mult": 0.0}}, allow_unmatched=True)) == ["default"]
    nothing = ParamKey(predicate=ParamPredicate("5-D", lambda param: param.dim() == 5))
    assert list(groups_of(Model(), {nothing: {"wd_mult": 0.0}})) == ["default"]
    assert not caplog.records


def test_a_multiplier_of_no_rate_is_refused():
    with pytest.raises(ConfigError, match=r"group '\*\.bias' has lr_mult=0\.5 but no learning rate; set lr"):
        get_param_groups([Model()], OptimizerConfig(), {BIAS: {"lr_mult": 0.5}})


def test_predicates_of_one_name_that_disagree_are_refused():
    overrides = {
        ParamKey(predicate=ParamPredicate("p", lambda param: True)): {"wd_mult": 0.0},
        ParamKey(with_name_predicate=ParamWithNamePredicate("p", lambda param, name: "bias" in name)): {"max_lr": 1.0},
    }
    with pytest.raises(ConfigError, match="the same keys make different groups"):
        get_param_groups([Model()], CONFIG, overrides)


def test_a_bare_module_and_metas_of_another_model_are_refused():
    with pytest.raises(ConfigError, match=r"^model_chunks: Sequential is a module: pass a list, \[model\]$"):
        get_param_groups(nn.Sequential(nn.Linear(2, 2)), CONFIG, {})
    with pytest.raises(ConfigError, match=r"^metas: no entry for parameter 'embedding\.weight'; pass describe"):
        get_param_groups([Model()], CONFIG, {}, metas=describe([Experts()]))
