"""Parameter groups: each parameter once, overrides merged, names that no hyper-parameter changes."""

import copy
import dataclasses

import pytest
import torch
from models import Experts, Model, mark
from torch import nn

from opt_config import ConfigError, OptimizerConfig, ParamKey, ParamPredicate, ParamWithNamePredicate
from opt_paramgroups import (
    ParamId,
    describe,
    get_matrix_rule_overrides,
    get_param_groups,
    get_param_groups_and_buffers,
    get_standard_config_overrides,
    matches,
    parameters_by_id,
)

CONFIG = OptimizerConfig(lr=1e-2, min_lr=1e-4, weight_decay=0.1)
BIAS = ParamKey(name="*.bias")
VECTOR = ParamKey(predicate=ParamPredicate("1-D", lambda param: param.dim() == 1))


def groups_of(model, overrides, config=CONFIG, **options):
    """Groups by name."""
    return {group["name"]: group for group in get_param_groups([model], config, overrides, **options)}


def names_in(group):
    return [id.name for id in group["param_ids"]]


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


def test_unset_rates_stay_unset():
    (group,) = get_param_groups([nn.Linear(3, 5)], OptimizerConfig(), {})
    assert (group["lr"], group["max_lr"], group["min_lr"], group["weight_decay"]) == (None, None, None, 0.01)


@pytest.mark.parametrize(
    "overrides",
    [None, {}, {BIAS: {"wd_mult": 0.0}, ParamKey(name="layers.0.*"): {"max_lr": 1.0}}],
    ids=["standard", "none", "two keys"],
)
def test_every_trainable_parameter_is_in_exactly_one_group(overrides):
    model = Model()
    groups = get_param_groups([model], CONFIG, overrides)
    found = [param for group in groups for param in group["params"]]
    assert len(found) == len({id(param) for param in found}) == len(list(model.parameters()))
    assert {id(param) for param in found} == {id(param) for param in model.parameters()}
    for group in groups:
        by_id = parameters_by_id([model])
        assert all(by_id[id] is param for id, param in zip(group["param_ids"], group["params"], strict=True))


def test_none_means_the_standard_overrides_and_an_empty_dict_none():
    model = Model()
    standard = get_param_groups([model], CONFIG, None)
    spelt_out = get_param_groups([model], CONFIG, get_standard_config_overrides(CONFIG))
    assert [group["param_ids"] for group in standard] == [group["param_ids"] for group in spelt_out]
    assert {group["wd_mult"] for group in standard} == {0.0, 1.0}
    assert len(get_param_groups([model], CONFIG, {})) == 1


def test_overrides_of_all_matching_keys_are_merged():
    overrides = {BIAS: {"wd_mult": 0.0}, VECTOR: {"max_lr": 1.0, "eps": 1e-6}}
    groups = groups_of(Model(num_layers=1), overrides)
    assert list(groups) == ["default", "*.bias & <1-D>", "<1-D>"]
    both = groups["*.bias & <1-D>"]
    expected = {"wd_mult": 0.0, "max_lr": 1.0, "lr": 1.0, "eps": 1e-6, "weight_decay": 0.0}
    assert {entry: both[entry] for entry in expected} == expected
    assert all(name.endswith("norm.weight") for name in names_in(groups["<1-D>"]))
    assert "eps" not in groups["default"]


def test_keys_that_lead_to_one_override_share_a_group():
    overrides = {BIAS: {"wd_mult": 0.0}, ParamKey(name="output.weight"): {"wd_mult": 0.0}}
    groups = groups_of(Model(num_layers=1), overrides)
    assert list(groups) == ["default", "*.bias, output.weight"]


def test_the_order_of_keys_and_entries_does_not_matter():
    one = {BIAS: {"wd_mult": 0.0, "max_lr": 1.0}, VECTOR: {"max_lr": 1.0}}
    other = {VECTOR: {"max_lr": 1.0}, BIAS: {"max_lr": 1.0, "wd_mult": 0.0}}
    model = Model()
    assert get_param_groups([model], CONFIG, one) == get_param_groups([model], CONFIG, other)


def test_contradicting_keys_are_an_error_that_names_both_and_the_parameter():
    with pytest.raises(ConfigError) as caught:
        get_param_groups([Experts()], CONFIG, {BIAS: {"wd_mult": 0.0}, VECTOR: {"wd_mult": 0.5}})
    assert str(caught.value) == (
        "parameter 'router.bias': key '*.bias' sets 'wd_mult' to 0.0, key '<1-D>' to 0.5; set it in one of them "
        "only, or let them match different parameters"
    )


def test_experts_are_apart_from_dense_parameters():
    groups = groups_of(Experts(), {BIAS: {"wd_mult": 0.0}})
    assert list(groups) == ["default", "default (experts)", "*.bias", "*.bias (experts)"]
    assert [group["is_expert_parallel"] for group in groups.values()] == [False, True, False, True]
    assert names_in(groups["*.bias (experts)"]) == ["experts.0.bias", "experts.1.bias"]
    assert [group["default_config"] for group in groups.values()] == [True, True, False, False]


def test_tied_parameters_are_grouped_once_under_their_first_name():
    model = Model()
    model.output.weight = model.embedding.weight
    (group,) = get_param_groups([model], CONFIG, {})
    assert "embedding.weight" in names_in(group)
    assert "output.weight" not in names_in(group)


def test_a_parameter_tied_over_chunks_belongs_to_the_first():
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3)
    second.weight = first.weight
    (group,) = get_param_groups([first, second], CONFIG, {})
    assert group["param_ids"] == [ParamId(0, "weight"), ParamId(1, "bias")]


def test_frozen_parameters_are_never_grouped():
    model = Model()
    model.embedding.requires_grad_(False)
    groups = get_param_groups([model], CONFIG, None)
    assert not any("embedding" in id.name for group in groups for id in group["param_ids"])


def test_the_callers_arguments_are_left_as_they_were():
    model = Model()
    overrides = {BIAS: {"wd_mult": 0.0}, VECTOR: dataclasses.replace(CONFIG, lr=1.0)}
    before, config_before = copy.deepcopy(overrides), copy.deepcopy(CONFIG)
    groups = get_param_groups([model], CONFIG, overrides)
    groups[1]["wd_mult"] = 7.0
    assert overrides == before
    assert config_before == CONFIG


def test_no_parameter_and_no_config_is_written_to():
    model, config = Model(), copy.deepcopy(CONFIG)
    attributes = {name: dict(vars(param)) for name, param in model.named_parameters()}
    values = copy.deepcopy(model.state_dict())
    get_param_groups([model], config, None)
    get_param_groups([model], config, get_matrix_rule_overrides(OptimizerConfig(optimizer="muon")))
    assert {name: vars(param) for name, param in model.named_parameters()} == attributes
    assert all(torch.equal(model.state_dict()[name], value) for name, value in values.items())
    assert config == CONFIG


def test_a_name_follows_from_the_keys_and_not_from_the_numbers():
    one = {BIAS: {"wd_mult": 0.0}, ParamKey(attr="is_embedding_or_output_parameter"): {"max_lr": 1e-3}}
    other = {BIAS: {"wd_mult": 0.25}, ParamKey(attr="is_embedding_or_output_parameter"): {"max_lr": 7e-3}}
    assert list(groups_of(Model(), one)) == list(groups_of(Model(), other, OptimizerConfig(lr=3.0)))


def test_a_wrapped_model_has_the_same_ids():
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    model = Model()
    plain = get_param_groups([model], CONFIG, None)
    wrapped = get_param_groups([Wrapper(Wrapper(model))], CONFIG, None)
    assert [group["param_ids"] for group in wrapped] == [group["param_ids"] for group in plain]


def test_a_module_of_that_name_is_no_wrapper_where_it_has_siblings():
    model = nn.ModuleDict({"module": nn.Linear(2, 2, bias=False), "head": nn.Linear(2, 2, bias=False)})
    assert [id.name for id in parameters_by_id([model])] == ["module.weight", "head.weight"]


# --- overrides that are configurations ----------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({"lr": 0.5, "min_lr": 0.1}, {"max_lr": 0.5, "min_lr": 0.1, "lr": 0.5}, id="rates"),
        pytest.param({"weight_decay": 0.3}, {"start_wd": 0.3, "end_wd": 0.3, "weight_decay": 0.3}, id="weight decay"),
        pytest.param({"adam_beta2": 0.95}, {"betas": (0.9, 0.95)}, id="Adam's betas"),
        pytest.param({"adam_eps": 1e-6}, {"eps": 1e-6}, id="eps"),
        pytest.param(
            {"optimizer": "sgd", "sgd_momentum": 0.5}, {"optimizer": "sgd", "momentum": 0.5}, id="SGD's momentum"
        ),
        pytest.param(
            {"optimizer": "lion", "lion_beta1": 0.5}, {"optimizer": "lion", "betas": (0.5, 0.98)}, id="Lion's betas"
        ),
        pytest.param(
            {"optimizer": "muon", "muon_momentum": 0.5}, {"optimizer": "muon", "momentum": 0.5}, id="Muon's momentum"
        ),
    ],
)
def test_of_a_configuration_what_differs_is_the_override(changes, expected):
    group = groups_of(Model(), {BIAS: dataclasses.replace(CONFIG, **changes)})["*.bias"]
    assert {entry: group[entry] for entry in expected} == expected


def test_a_configuration_that_differs_in_nothing_makes_no_group():
    assert list(groups_of(Model(), {BIAS: dataclasses.replace(CONFIG)})) == ["default"]


def test_unset_rates_of_a_configuration_change_nothing():
    override = OptimizerConfig(weight_decay=0.1, adam_eps=1e-6)
    assert groups_of(Model(), {BIAS: override})["*.bias"]["max_lr"] == CONFIG.lr


def test_an_override_may_name_another_optimizer():
    groups = groups_of(Model(), {BIAS: {"optimizer": "sgd"}}, OptimizerConfig(optimizer="lion"))
    assert {name: group["optimizer"] for name, group in groups.items()} == {"default": "lion", "*.bias": "sgd"}


# --- refusals -----------------------------------------------------------------------------

REFUSED = {
    "a pattern in place of a key": (
        {"*.bias": {"wd_mult": 0.0}},
        "config_overrides: '*.bias': must be a ParamKey; for a pattern of names, ParamKey(name=...)",
    ),
    "a number in place of an override": (
        {BIAS: 0.0},
        "config_overrides[*.bias]: 0.0: must be a ParamGroupOverride (a dict) or an OptimizerConfig",
    ),
    "lr": (
        {BIAS: {"lr": 1e-3}},
        "config_overrides[*.bias]: lr=0.001: may not be set: the schedule writes it; set max_lr, min_lr or lr_mult",
    ),
    "weight_decay": (
        {BIAS: {"weight_decay": 0}},
        "config_overrides[*.bias]: weight_decay=0: may not be set: the schedule writes it; set wd_mult, or start_wd "
        "and end_wd",
    ),
    "a negative rate": ({BIAS: {"max_lr": -1}}, "config_overrides[*.bias]: max_lr=-1: must be at least 0 and finite"),
    "a string for a number": (
        {BIAS: {"wd_mult": "0"}},
        "config_overrides[*.bias]: wd_mult='0': must be at least 0 and finite",
    ),
    "betas above one": (
        {BIAS: {"betas": (0.9, 1.5)}},
        "config_overrides[*.bias]: betas=(0.9, 1.5): must be a tuple of numbers in [0, 1)",
    ),
    "a dict as an entry": (
        {BIAS: {"options": {"a": 1}}},
        "config_overrides[*.bias]: options={'a': 1}: must be a number, a string or a tuple of these: parameters share "
        "a group when all their entries are equal",
    ),
    "a misspelt entry": (
        {BIAS: {"wd_mul": 0}},  # was put into the group, and every bias decayed
        "config_overrides[*.bias]: wd_mul=0: unknown entry; nothing reads it. Allowed are betas, clip_grad, end_wd, "
        "eps, is_decoupled_lr, lr_mult, max_lr, min_lr, momentum, optimizer, start_wd, wd_mult. Did you mean wd_mult "
        "or lr_mult? For an entry that your own code reads, pass extra_group_keys=('wd_mul',)",
    ),
    "an optimizer that is no name": (
        {BIAS: {"optimizer": torch.optim.SGD}},
        f"config_overrides[*.bias]: optimizer={torch.optim.SGD!r}: must be the name of a rule",
    ),
    "a field that is one for all": (
        {BIAS: dataclasses.replace(CONFIG, clip_grad=2.0)},
        "config_overrides[*.bias]: clip_grad=2.0 differs from 1.0 in the main configuration; an override with adam "
        "may change only lr, min_lr, weight_decay, optimizer, adam_beta1, adam_beta2, adam_eps; derive it from the "
        "main configuration by dataclasses.replace(config, ...)",
    ),
    "a number that the rule does not read": (
        {BIAS: dataclasses.replace(CONFIG, optimizer="sgd", adam_eps=1.0)},
        "config_overrides[*.bias]: adam_eps=1.0 differs from 1e-08 in the main configuration; an override with sgd "
        "may change only lr, min_lr, weight_decay, optimizer, sgd_momentum; derive it from the main configuration by "
        "dataclasses.replace(config, ...)",
    ),
    "patterns that match nothing": (
        {ParamKey(name="*.biass"): {"wd_mult": 0.0}, ParamKey(attr="is_embeding_parameter"): {"max_lr": 1.0}},
        "config_overrides[*.biass]: matches no parameter. Did you mean *.bias?\n"
        "config_overrides[@is_embeding_parameter]: matches no parameter. Did you mean is_embedding_parameter "
        "or is_embedding_or_output_parameter?\n"
        "Correct or drop the key, or pass allow_unmatched=True.",
    ),
}


@pytest.mark.parametrize(("overrides", "message"), REFUSED.values(), ids=REFUSED)
def test_a_bad_override_is_refused_with_its_message(overrides, message):
    with pytest.raises(ConfigError) as caught:
        get_param_groups([Model()], CONFIG, overrides)
    assert str(caught.value) == message


@pytest.mark.parametrize("value", [float("nan"), torch.ones(2), torch.tensor(1.0)], ids=["NaN", "tensor", "0-d"])
def test_values_that_are_not_equal_to_themselves_are_refused(value):
    """A NaN of two keys was reported as a conflict of a key with itself; a tensor of two keys as an ambiguous bool."""
    overrides = {BIAS: {"mine": value}, ParamKey(name="output.*"): {"mine": value}}
    with pytest.raises(
        ConfigError, match=r"config_overrides\[\*\.bias\]: mine=.*: must be a number, a string or a tuple"
    ):
        get_param_groups([Model()], CONFIG, overrides, extra_group_keys=("mine",))


def test_a_lazy_parameter_is_refused_by_its_name():
    with pytest.raises(ConfigError, match=r"^parameter '0\.weight' is uninitialized: .*run one forward pass"):
        get_param_groups([nn.Sequential(nn.LazyLinear(3))], CONFIG, None)


def test_a_misspelt_entry_is_refused_even_if_its_value_is_none():
    with pytest.raises(ConfigError, match=r"config_overrides\[\*\.bias\]: wd_mul=None: unknown entry"):
        get_param_groups([Model()], CONFIG, {BIAS: {"wd_mul": None}})


@pytest.mark.parametrize(
    ("entry", "extra"),
    [("role", ("role",)), ("role", None), ("amsgrad", ())],
    ids=["declared", "any", "read by torch's Adam"],
)
def test_entries_that_something_else_reads_may_be_set(entry, extra):
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


def test_a_key_that_matches_trainable_parameters_too_is_not_warned_of(caplog):
    model = Model()
    model.embedding.requires_grad_(False)
    groups_of(model, {ParamKey(name="*.weight"): {"max_lr": 1.0}})
    assert not caplog.records


def test_an_unmatched_pattern_is_accepted_if_requested():
    overrides = {ParamKey(name="*.adapter"): {"wd_mult": 0.0}}
    assert list(groups_of(Model(), overrides, allow_unmatched=True)) == ["default"]


def test_a_predicate_may_find_nothing():
    overrides = {ParamKey(predicate=ParamPredicate("5-D", lambda param: param.dim() == 5)): {"wd_mult": 0.0}}
    assert list(groups_of(Model(), overrides)) == ["default"]


def test_a_multiplier_of_no_rate_is_refused():
    with pytest.raises(ConfigError, match=r"group '\*\.bias' has lr_mult=0\.5 but no learning rate; set lr"):
        get_param_groups([Model()], OptimizerConfig(), {BIAS: {"lr_mult": 0.5}})


def test_predicates_of_one_name_with_different_answers_are_refused():
    overrides = {
        ParamKey(predicate=ParamPredicate("p", lambda param: True)): {"wd_mult": 0.0},
        ParamKey(with_name_predicate=ParamWithNamePredicate("p", lambda param, name: "bias" in name)): {"max_lr": 1.0},
    }
    with pytest.raises(ConfigError, match="the same keys make different groups"):
        get_param_groups([Model()], CONFIG, overrides)


def test_a_module_in_place_of_chunks_is_refused():
    with pytest.raises(ConfigError) as caught:
        get_param_groups(nn.Sequential(nn.Linear(2, 2)), CONFIG, {})
    assert str(caught.value) == "model_chunks: Sequential is a module: pass a list, [model]"


def test_metas_of_another_model_are_refused():
    with pytest.raises(ConfigError, match=r"^metas: no entry for parameter 'embedding\.weight'; pass describe"):
        get_param_groups([Model()], CONFIG, {}, metas=describe([Experts()]))


def test_lr_mult_multiplies_both_rates():
    group = groups_of(Model(), {BIAS: {"lr_mult": 0.5}})["*.bias"]
    assert (group["lr"], group["max_lr"], group["min_lr"]) == (5e-3, 5e-3, 5e-5)


# --- what is known of the parameters ------------------------------------------------------


def test_known_attributes_are_read_from_the_meta():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3, bias=False))
    metas = describe([model], overrides={"0.weight": {"is_embedding_or_output": True}})
    config = OptimizerConfig(lr=1.0, decoupled_lr=0.5)
    groups = {group["name"]: group for group in get_param_groups([model], config, None, metas=metas)}
    assert names_in(groups["@is_embedding_or_output_parameter"]) == ["0.weight"]


def test_a_false_role_wins_over_the_tensors_attribute():
    model = Model()
    metas = describe([model], overrides={"output.weight": {"is_embedding_or_output": False}})
    groups = get_param_groups([model], OptimizerConfig(lr=1.0, decoupled_lr=0.5), None, metas=metas)
    assert [names_in(group) for group in groups if group["is_decoupled_lr"]] == [["embedding.weight"]]


def test_other_attributes_are_read_from_the_tensor():
    model = Model()
    mark(model.output.weight, mine=True)
    assert names_in(groups_of(model, {ParamKey(attr="mine"): {"max_lr": 1.0}})["@mine"]) == ["output.weight"]


@pytest.mark.parametrize("attr", ["use_muon", "allreduce", "partition_stride"])
def test_an_attribute_that_defaults_to_true_matches_only_where_it_is_set(attr):
    model = Model()
    mark(model.output.weight, **{attr: 1})
    assert names_in(groups_of(model, {ParamKey(attr=attr): {"max_lr": 1.0}})[f"@{attr}"]) == ["output.weight"]


def test_matches_is_the_keys_own_answer():
    param = mark(nn.Parameter(torch.zeros(3)), special=True)
    assert matches(param, "a.weight", ParamKey(attr="special"))
    assert not matches(param, "a.weight", BIAS)


# --- groups and buffers -------------------------------------------------------------------


def test_plain_modules_have_no_buffers_of_ours():
    found = get_param_groups_and_buffers([Model()], 0, CONFIG, {}, lambda group: True, "buffers")
    assert found.buffers == {}
    assert len(found.param_groups) == 1


def test_groups_are_filtered_and_buffers_numbered_from_the_offset():
    class Wrapped(nn.Module):
        def __init__(self, module: nn.Module, expert_buffers: list[str]) -> None:
            super().__init__()
            self.module = module
            self.expert_parallel_buffers = expert_buffers

    chunks = [Wrapped(Experts(), ["a"]), Experts(), Wrapped(Experts(), ["b", "c"])]
    groups, buffers = get_param_groups_and_buffers(
        chunks, 3, CONFIG, {}, lambda group: group["is_expert_parallel"], "expert_parallel_buffers"
    )
    assert buffers == {3: ["a"], 5: ["b", "c"]}
    (group,) = groups
    assert {id.chunk for id in group["param_ids"]} == {3, 4, 5}
    assert all(id.name.startswith("experts.") for id in group["param_ids"])


def test_torch_optimizers_take_the_groups():
    groups = get_param_groups([Model()], CONFIG, None)
    optimizer = torch.optim.AdamW(groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert [group["name"] for group in optimizer.param_groups] == [group["name"] for group in groups]
