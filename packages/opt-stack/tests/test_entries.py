"""Entries of groups: each is read or refused, in overrides, given groups, loaded groups, and when it changes later."""

import copy
import dataclasses
import math
import re
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from parity import roles_over
from stack_models import assert_equal, make_model, train, weights
from torch import Tensor, nn

from opt_config import ConfigError, OptimizerConfig, ParamKey
from opt_distributed import Alone, run_threads
from opt_distributed.comm import Comm
from opt_distributed.comm.threads import ThreadComm
from opt_kernels.formulas import Formula, Number, State, fma
from opt_kernels.hooks import CautiousDecay, ClipUpdateRms, Hook
from opt_kernels.optim import Adam, AdamW
from opt_kernels.rules import SGD, ElementwiseRule
from opt_paramgroups import get_matrix_rule_overrides
from opt_scheduler import FieldScheduler, OptimizerParamScheduler, linear
from opt_stack import (
    Optimizer,
    Registry,
    RuleEntry,
    get_optimizer,
    get_optimizer_based_on_param_groups,
)

CONFIG = OptimizerConfig(lr=1e-2, weight_decay=0.1)
BIAS = ParamKey(name="*.bias")


# --- overrides and given groups ---------------------------------------------------------------------------------------

OVERRIDES = [
    ("adam", {"wd_mul": 0}, "group '*.bias': wd_mul=0: unknown entry; nothing reads it. Allowed are betas, "),
    ("adam", {"momentum": 0.5}, "optimizer 'adam' does not read it; it reads lr, weight_decay, betas, eps"),
    ("sgd", {"betas": (0.5, 0.5)}, "optimizer 'sgd' does not read it; it reads lr, weight_decay, dampening, momentum"),
    ("adam", {"amsgrad": True}, "amsgrad=True: not supported by optimizer 'adam'; False is allowed"),
]
GROUPS = [
    ({"wd_mul": 0.0}, "group 'group 0': wd_mul=0.0: unknown entry"),
    ({"maximize": True}, "group 'group 0': maximize=True: not supported by optimizer 'adam'; False is allowed"),
    ({"betas": (0.9, 1.5)}, "group 'group 0': betas=(0.9, 1.5): must be a tuple of numbers in [0, 1)"),
    ({"lr": -1.0}, "group 'group 0': lr=-1.0: must be at least 0 and finite"),
    ({"lr": 1e-3, "lr_mult": 0.5}, "group 'group 0' has lr=0.001 and lr_mult=0.5"),
]


def test_unread_entries_in_overrides_and_groups_are_refused() -> None:
    model = make_model()
    for rule, override, message in OVERRIDES:
        with pytest.raises(ConfigError, match=re.escape(message)):
            get_optimizer(OptimizerConfig(optimizer=rule, lr=1e-2), [model], {BIAS: override})
    for entries, message in GROUPS:
        with pytest.raises(ConfigError, match=re.escape(message)):
            get_optimizer_based_on_param_groups(CONFIG, [model], [{"params": list(model.parameters()), **entries}])


def test_one_override_may_cover_parameters_of_several_rules() -> None:
    config = OptimizerConfig(optimizer="muon", lr=1e-2)
    optimizer = get_optimizer(config, [make_model()], {ParamKey(name="0.*"): {"betas": (0.5, 0.6), "momentum": 0.5}})
    by_rule = {g["optimizer"]: g for g in optimizer.param_groups if g["name"].startswith("0.")}
    assert (by_rule["muon"]["momentum"], by_rule["adam"]["betas"]) == (0.5, (0.5, 0.6))


def test_entries_of_ones_own_may_be_declared() -> None:
    optimizer = get_optimizer(CONFIG, [make_model()], {BIAS: {"role": "bias"}}, extra_group_keys=("role",))
    assert [group.get("role") for group in optimizer.param_groups] == [None, "bias"]


def decaying(optimizer: Optimizer, start: float, end: float) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.01,
        max_lr=0.1,
        min_lr=0.01,
        lr_warmup_steps=0,
        lr_decay_steps=4,
        lr_decay_style="constant",
        start_wd=start,
        end_wd=end,
        wd_incr_steps=4,
        wd_incr_style="constant" if start == end else "linear",
    )


SCHEDULES: dict[str, Any] = {
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1e-2, total_steps=10),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "relative": lambda o: FieldScheduler(
        o, {"lr": linear(1.0, 0.0, steps=10), "eps": linear(1.0, 0.5, steps=10)}, relative=True
    ),
    "Megatron-Core's": lambda o: decaying(o, 0.1, 0.1),
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_entries_of_schedulers_and_torchs_optimizers_are_taken(schedule: Any) -> None:
    model = make_model()
    first = get_optimizer(CONFIG, [model])
    schedule(first)
    again = get_optimizer_based_on_param_groups(CONFIG, [model], first.param_groups)
    assert [set(group) for group in again.param_groups] == [set(group) for group in first.param_groups]
    signum = OptimizerConfig(optimizer="signum", lr=1e-2)
    adamw_of_torch = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for config, of_torch in ((CONFIG, adamw_of_torch), (signum, torch.optim.SGD(model.parameters(), lr=1e-3))):
        (group,) = get_optimizer_based_on_param_groups(config, [model], of_torch.param_groups).param_groups
        assert group["lr"] == 1e-3
    first.param_groups[0]["a_tag"] = "of the caller"  # whose code may add entries, too
    before = [dict(group) for group in first.param_groups]
    train(model, first, range(1))
    assert first.param_groups == before


def test_an_entry_that_is_none_is_not_set() -> None:
    """Symptom: wd_mult=None ended in a TypeError, and start_wd=None in one of the first step."""
    model = make_model()
    params = list(model.parameters())
    unset = dict.fromkeys(("lr", "max_lr", "min_lr", "lr_mult", "wd_mult", "start_wd", "weight_decay", "name"))
    groups = []
    for entries in (unset, {}):
        optimizer = get_optimizer_based_on_param_groups(CONFIG, [model], [{"params": params, **entries}])
        groups.append(optimizer.param_groups)
    assert groups[0] == groups[1]


# --- rules of one's own -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Powered(ElementwiseRule):
    """A rule whose gradients are multiplied by a number of the group, which only this rule knows."""

    hyper_names = ("alpha",)  # type: ignore[assignment]

    @property
    def name(self) -> str:
        return "powered"

    def update_(self, batches: Any, *, grad_scale: Any = 1.0, skip: Any = None) -> None:
        for batch in batches:
            scale = grad_scale * batch.hyper.own["alpha"]
            ElementwiseRule.update_(self, [batch], grad_scale=scale, skip=skip)


def powered(model: nn.Module, overrides: Any = None, **hyper: Any) -> Optimizer:
    rule = RuleEntry(
        name="powered",
        summary="SGD times alpha",
        make=lambda config: Powered(formula=SGD(momentum_buffer=False).formula),
        hyper=lambda config: {"momentum": 0.0, **hyper},
    )
    config = OptimizerConfig(optimizer="powered", lr=0.5, weight_decay=0.0, clip_grad=0.0)
    return get_optimizer(config, [model], overrides, rules=Registry().with_rule(rule))


def test_overrides_reach_the_numbers_that_a_rule_declares() -> None:
    plain = OptimizerConfig(optimizer="sgd", sgd_momentum=0.0, lr=0.5, weight_decay=0.0, clip_grad=0.0)
    model = make_model()
    other = make_model()
    start = weights(model)
    optimizer = powered(model, {BIAS: {"alpha": 4.0}}, alpha=2.0)
    assert [group["alpha"] for group in optimizer.param_groups] == [2.0, 4.0]
    train(model, optimizer, range(1))
    train(other, get_optimizer(plain, [other]), range(1))
    for name, weight in weights(model).items():
        factor = 4.0 if name.endswith("bias") else 2.0
        torch.testing.assert_close(weight - start[name], factor * (weights(other)[name] - start[name]))
    resumed = powered(other, {BIAS: {"alpha": 1.0}}, alpha=1.0)
    resumed.load_state_dict(optimizer.state_dict())
    assert [group["alpha"] for group in resumed.param_groups] == [2.0, 4.0]


def test_what_an_entry_gives_and_a_rule_reads_must_agree() -> None:
    with pytest.raises(ConfigError, match=r"RuleEntry.hyper returns 'beta', which its rule never reads; allowed are "):
        powered(make_model(), alpha=1.0, beta=0.9)
    with pytest.raises(ConfigError, match=r"its rule reads 'alpha' \(hyper_names\), but RuleEntry.hyper returns no v"):
        powered(make_model())


def scalars(*, lr: float, beta1: float) -> dict[str, float]:
    return {"lr": lr, "weight": 1 - beta1}


def update(p: Any, g: Any, m: Any, *, lr: Any, weight: Any) -> Any:
    m = fma(weight, g - m, m)
    return p - lr * m, m


UNDECAYED = Formula(
    name="undecayed", states=(State("m"),), numbers=(Number("betas", (0.9, 0.99)),), scalars=scalars, update=update
)
RULES = Registry().with_formula(UNDECAYED)


def built(*hooks: Hook, model: nn.Module | None = None, overrides: Any = None, **fields: Any) -> Optimizer:
    config = OptimizerConfig(**{"optimizer": "undecayed", "lr": 0.5, "clip_grad": 0.0, **fields})
    return get_optimizer(config, [model or nn.Linear(4, 4)], overrides, rules=RULES, hooks=hooks)


UNREAD: list[tuple[dict[str, Any], str]] = [
    ({"weight_decay": 0.1}, "group 'default': weight_decay=0.1 has no effect: formula 'undecayed' never reads it"),
    ({"optimizer_options": {"betas": (0.9, 0.5)}}, "formula 'undecayed' never reads beta2; leave it at 0.99"),
    ({"overrides": {ParamKey(name="bias"): {"start_wd": 0.0, "end_wd": 0.1}}}, "end_wd=0.1 has no effect"),
    ({"optimizer_options": {"lr": 1}}, "'lr'=1; for optimizer='undecayed' a field of the configuration sets it"),
    (
        {"optimizer": "muon", "optimizer_options": {"maximize": True}},
        "'maximize'=True: only parameters of 'adam' would, not those of 'muon'",
    ),
    ({"optimizer_options": {"backend": 1}}, "'backend'=1; for optimizer='undecayed' the stack chooses the fastest"),
    ({"optimizer_options": {"stochastic_rounding": 1}}, "optimizer='undecayed' the stack keeps main values; only the"),
]


def test_a_number_that_no_rule_reads_is_refused() -> None:
    for fields, message in UNREAD:
        with pytest.raises(ConfigError, match=re.escape(message)):
            built(**fields)
    model = nn.Linear(4, 4)
    groups = [{"params": list(model.parameters()), "weight_decay": 0.3}]
    config = OptimizerConfig(optimizer="undecayed", lr=0.5)
    with pytest.raises(ConfigError, match=re.escape("weight_decay=0.3 has no effect")):
        get_optimizer_based_on_param_groups(config, [model], groups, rules=RULES)


@pytest.mark.parametrize("rule", ["muon", "soap"])
def test_options_next_to_a_matrix_rule_go_to_the_other_rule(rule: str) -> None:
    codes = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8}
    trained = {}
    for optimizer_rule in (rule, "adam"):
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        optimizer = built(model=model, optimizer=optimizer_rule, optimizer_options=codes)
        for _ in range(2):
            model(torch.ones(2, 8)).square().sum().backward()
            optimizer.step()
        assert "state: exp_avg int8, exp_avg_scale fp32, exp_avg_sq uint8" in str(optimizer.plan)
        trained[optimizer_rule] = model
    assert not torch.equal(trained[rule].weight, trained["adam"].weight)
    with pytest.raises(ConfigError, match=f"adam reads them, and updates no parameter of optimizer='{rule}'"):
        built(model=nn.Linear(8, 8, bias=False), optimizer=rule, optimizer_options=codes)


@pytest.mark.parametrize("rule", ["muon", "soap"])
def test_values_given_under_the_key_of_other_params_are_kept(rule: str) -> None:
    (key,) = get_matrix_rule_overrides(OptimizerConfig(optimizer=rule))
    lion = get_matrix_rule_overrides(OptimizerConfig(optimizer=rule), scalar_optimizer="lion")
    for overrides, expected in ((lion, ("lion", 0.5)), ({key: {"max_lr": 0.1}}, ("adam", 0.1))):
        groups = built(optimizer=rule, overrides=overrides).param_groups
        assert [(group["optimizer"], group["lr"]) for group in groups] == [(rule, 0.5), expected]
    with pytest.raises(ConfigError, match="nothing reads it"):
        built(optimizer=rule, overrides={key: {"max_rl": 0.1}})


def test_defaults_and_what_a_rule_or_hook_reads_are_accepted() -> None:
    built()
    built(weight_decay=0.0, optimizer_options={"betas": (0.5, 0.99)})
    built(CautiousDecay(), weight_decay=0.1)
    built(overrides={ParamKey(name="bias"): {"optimizer": "adam"}}, adam_beta1=0.5)


# --- fields that only other rules read --------------------------------------------------------------------------------

OTHERS = {  # a value other than the default of every field that only some rules read
    "adam_beta1": 0.5, "adam_beta2": 0.5, "adam_eps": 1e-6, "sgd_momentum": 0.5, "lion_beta1": 0.5, "lion_beta2": 0.5,
    "muon_momentum": 0.5, "muon_split_qkv": False, "muon_nesterov": True, "muon_scale_mode": "mup",
    "muon_fp32_matmul_prec": "high", "muon_coefficient_type": "aol", "muon_num_ns_steps": 4,
    "muon_tp_mode": "duplicated", "muon_extra_scale_factor": 0.5, "muon_scalar_optimizer": "lion",
    "muon_use_syrk": True, "muon_weight_decay_method": "independent", "muon_pre_norm": "rows",
    "muon_post_norm": "rows", "muon_nuclear_scale": True, "soap_shampoo_beta": 0.5,
    "soap_precondition_frequency": 3, "soap_use_kl_shampoo": False, "soap_order": "megatron",
    "soap_max_precond_dim": 64, "soap_one_sided": True, "soap_split_qkv": True,
    "adaptive_muon_moment2_method": "normuon", "adaptive_muon_beta2": 0.5, "adaptive_muon_eps": 1e-6,
    "adaptive_muon_lines": "cols",
}  # fmt: skip
BIAS_BY_LION = {ParamKey(name="*.bias"): {"optimizer": "lion"}}
NOT_NUCLEAR = {"muon_nuclear_scale": False}  # which norms, and a second moment, exclude
READ: dict[str, tuple[dict[str, Any], Any, str]] = {  # configuration, overrides, patterns of the fields that are read
    "adam": ({}, None, "adam_.*"),
    "sgd": ({"optimizer": "sgd"}, None, "sgd_.*"),
    "adan": ({"optimizer": "adan"}, None, ""),
    "signum": ({"optimizer": "signum"}, None, ""),
    "adam and lion": ({}, BIAS_BY_LION, "adam_.*|lion_.*"),
    "muon": (
        {"optimizer": "muon", "muon_scalar_optimizer": "adam", **NOT_NUCLEAR},
        None,
        "adam_.*|muon_.*",
    ),
    "muon and lion": (
        {"optimizer": "muon", **NOT_NUCLEAR},
        None,
        "lion_.*|muon_.*",
    ),  # of muon_scalar_optimizer
    "adaptive muon": ({"optimizer": "adaptive_muon", **NOT_NUCLEAR}, None, "lion_.*|muon_.*|adaptive_.*"),
    "soap": ({"optimizer": "soap"}, None, "adam_.*|soap_.*"),
}


def fields_warned_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records if "without effect, because" in record.getMessage()]
    assert len(lines) <= 1
    assert all("\n" not in line for line in lines)
    return re.findall(r"(\w+)=", lines[0].partition(": without effect")[0]) if lines else []


@pytest.mark.parametrize("case", READ)
def test_fields_of_other_rules_are_one_warning(case: str, caplog: pytest.LogCaptureFixture) -> None:
    """Symptom: adam accepted muon_momentum without a word, while signum refused sgd_momentum."""
    fields, overrides, read = READ[case]
    given = {name: value for name, value in OTHERS.items() if name not in fields}
    get_optimizer(OptimizerConfig(lr=1e-2, **fields, **given), [make_model()], overrides)
    unread = [field.name for field in dataclasses.fields(OptimizerConfig) if field.name in given]
    assert fields_warned_of(caplog) == [name for name in unread if not re.fullmatch(read, name)]
    caplog.clear()
    get_optimizer(OptimizerConfig(lr=1e-2, **fields), [make_model()], overrides)
    assert fields_warned_of(caplog) == []


def test_a_field_that_a_rule_of_another_rank_reads_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    """One warning on one rank, and none if a stage of the pipeline has a group of that rule."""

    def rank_main(comm: ThreadComm) -> None:
        model = nn.Embedding(3, 2) if comm.rank else make_model()
        config = OptimizerConfig(lr=1e-2, optimizer="muon", muon_momentum=0.5, sgd_momentum=0.5, lion_beta1=0.5)
        get_optimizer(config, [model], pg_collection=roles_over(Alone(), everyone=comm))

    run_threads(2, rank_main)
    assert fields_warned_of(caplog) == ["sgd_momentum", "lion_beta1"]


def test_a_rule_of_ones_own_may_read_any_field(caplog: pytest.LogCaptureFixture) -> None:
    entry = RuleEntry(
        name="mine",
        summary="SGD",
        make=lambda config: Powered(formula=SGD(momentum_buffer=False).formula),
        hyper=lambda config: {"alpha": 1.0},
    )
    model = make_model()
    config = OptimizerConfig(optimizer="mine", lr=0.1, **OTHERS)
    get_optimizer(config, [model], {}, rules=Registry().with_rule(entry))
    assert fields_warned_of(caplog) == []
    built(adam_beta2=0.5)  # a formula reads none
    assert fields_warned_of(caplog) == ["adam_beta2"]


class Recorded(OptimizerConfig):
    """A configuration that records which fields are read."""

    read: ClassVar[set[str]] = set()

    def __getattribute__(self, name: str) -> Any:
        Recorded.read.add(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize("name", Registry().entries)
def test_the_table_of_fields_is_what_rules_read(name: str) -> None:
    config = Recorded(optimizer=name)
    Recorded.read.clear()
    entry = Registry()[name]
    entry.make(config)
    entry.hyper(config)
    by_the_plan = {"muon_scalar_optimizer", "muon_split_qkv", "soap_split_qkv"}
    assert OTHERS.keys() & Recorded.read - by_the_plan == Registry().fields_read(name, config) - by_the_plan


def test_default_weight_decay_has_no_effect_with_a_hook_either() -> None:
    found = []
    for hooks in ((), (ClipUpdateRms(1e6),)):
        model = make_model()
        train(model, built(*hooks, model=model), range(1))
        found.append(weights(model))
    torch.testing.assert_close(*found, rtol=0, atol=1e-7)  # decay would change them by 0.005 of each


# --- entries that change later ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [((), 0.0, 0.0), ((), 0.01, 0.01), ((CautiousDecay(),), 0.01, 0.1)], ids=str)
def test_weight_decay_schedules_are_accepted_if_flat_or_read(case: Any) -> None:
    hooks, start, end = case
    model = make_model()
    optimizer = built(*hooks, model=model, weight_decay=start)
    schedule = decaying(optimizer, start, end)
    for number in range(3):
        train(model, optimizer, range(number, number + 1))
        schedule.step(1)


def test_unread_betas_are_refused_but_loaded_numbers_are_not() -> None:
    model = make_model()
    optimizer = built(model=model)
    train(model, optimizer, range(1))
    optimizer.param_groups[0]["betas"] = (0.9, 0.5)
    with pytest.raises(ValueError, match="never reads beta2"):
        train(model, optimizer, range(1))
    optimizer.param_groups[0]["betas"] = (0.8, 0.99)
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        group["weight_decay"] = 0.1  # as of a version that did not refuse it
    optimizer.load_state_dict(saved)
    train(model, optimizer, range(1))
    optimizer.param_groups[0]["weight_decay"] = 0.2
    with pytest.raises(ValueError, match="has no effect"):
        train(model, optimizer, range(1))


# Entries that only schedulers read, or nothing: they describe the group.
DESCRIBING = ("params", "param_ids", "wd_mult", "lr_mult", "max_lr", "min_lr", "is_decoupled_lr", "default_config")
ADDED = {"clip_grad": False, "hooks": ("CautiousDecay()",), "maximize": True, "amsgrad": True, "nesterov": True}
NAMES = list(Registry().entries)


def built_rule(name: str) -> tuple[nn.Module, Optimizer]:
    model = make_model()
    return model, get_optimizer(OptimizerConfig(optimizer=name, lr=0.1, weight_decay=0.1), [model])


def step(model: nn.Module, optimizer: Optimizer, *, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator)
    optimizer.step()
    return [*weights(model).values()]


def other(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case str():
            return "lion" if value != "lion" else "sgd"
        case (str(), *_):  # a record of choices
            return value[1:]
        case tuple():
            return tuple(0.875 * number for number in value)
    return value * 0.5 if value > 1e-3 else 0.25 if isinstance(value, float) else 30


@pytest.mark.parametrize("name", NAMES)
def test_changed_entries_act_or_are_refused_and_removed_ones_are(name: str) -> None:
    """`optimizer`, `clip_grad` and torch's `nesterov` and `maximize` were ignored; in place of a removed entry, the
    default of another rule was used."""
    model, optimizer = built_rule(name)
    for seed in range(6):  # RAdam's first steps read no eps
        before = step(model, optimizer, seed=seed)
    saved = copy.deepcopy(optimizer.state_dict())
    group = optimizer.param_groups[0]
    unchanged = step(model, optimizer, seed=7)
    for entry in {*group, *ADDED}.difference(DESCRIBING):
        present = dict(group)
        with torch.no_grad():
            for param, weight in zip(model.parameters(), before, strict=True):
                param.copy_(weight)
        optimizer.load_state_dict(copy.deepcopy(saved))
        group[entry] = other(group[entry]) if entry in group else ADDED[entry]
        try:
            after = step(model, optimizer, seed=7)
        except ValueError as error:
            assert f"{entry}=" in str(error)  # noqa: PT017 - a change may also take effect
            after = before
            assert_equal([*weights(model).values()], before)
        assert not all(map(torch.equal, after, unchanged)), f"{entry} is ignored"
        group.clear()
        group.update(present)
    before = [*weights(model).values()]
    for entry in {*group}.difference(DESCRIBING):
        value = group.pop(entry)
        with pytest.raises(ValueError, match=f"no entry '{entry}'"):
            step(model, optimizer, seed=8)
        group[entry] = value
    assert_equal([*weights(model).values()], before)


def test_what_no_step_can_use_is_refused() -> None:
    model, optimizer = built_rule("adam")
    before = step(model, optimizer, seed=2)
    group = optimizer.param_groups[0]
    for entry, value, message in [
        ("betas", (0.9,), "betas=(0.9,) was set where the optimizer was built with (0.9, 0.999)"),
        ("betas", (0.9, 0.99, 0.999), "betas=(0.9, 0.99, 0.999) was set where"),
        ("betas", 0.9, "betas=0.9 was set where"),
        ("eps", "1e-8", "eps='1e-8' was set where the optimizer was built with 1e-08"),
        ("momentum", 0.5, "group 'default': momentum=0.5 was added, but its rule does not read it; it reads lr, "),
        ("ema_decay", 0.9, "group 'default': ema_decay=0.9 was added, but its rule does not read it; it reads lr, "),
    ]:
        present = dict(group)
        group[entry] = value
        with pytest.raises(ValueError, match=re.escape(message)):
            step(model, optimizer, seed=3)
        group.clear()
        group.update(present)
    assert_equal([*weights(model).values()], before)


NAN = math.nan
BAD_NUMBERS: dict[str, list[tuple[str, Any]]] = {  # by rule: an entry and what it is changed to
    "adam": [
        ("lr", NAN), ("lr", math.inf), ("lr", -1.0), ("lr", "0.01"), ("lr", 10**400), ("lr", np.float32(NAN)),
        ("lr", torch.tensor(NAN)), ("weight_decay", NAN), ("weight_decay", -0.1), ("betas", (1.5, 0.9)),
        ("betas", (0.9, 1.0)), ("betas", [0.9, NAN]), ("eps", -1.0), ("eps", NAN),
    ],
    "lion": [("lr", NAN), ("betas", (0.9, -0.1)), ("weight_decay", math.inf)],
    "sgd": [("lr", -0.1), ("momentum", NAN), ("momentum", -0.5), ("dampening", math.inf)],
    "muon": [("lr", NAN), ("weight_decay", -1.0), ("momentum", NAN), ("momentum", -1.0)],
    "soap": [("lr", math.inf), ("betas", (0.9, 1.5)), ("eps", -1e-8)],
    "nadam": [("lr", NAN), ("momentum_decay", NAN)],
}  # fmt: skip


@pytest.mark.parametrize("rule", BAD_NUMBERS)
def test_impossible_numbers_of_groups_are_refused_in_every_step(rule: str) -> None:
    """Symptom: a rate of NaN gave success and weights of NaN; betas above 1, and an eps below 0, were used."""
    model, optimizer = built_rule(rule)
    group = next(group for group in optimizer.param_groups if group["optimizer"] == rule)
    for taken in range(2):
        before = [*weights(model).values()]
        for entry, value in BAD_NUMBERS[rule]:
            usual = group[entry]
            group[entry] = value
            with pytest.raises(ValueError, match=f"group .*{entry}=.*pass .*. Nothing was updated"):
                step(model, optimizer, seed=3)
            assert_equal([*weights(model).values()], before)
            group[entry] = usual
        assert not all(map(torch.equal, step(model, optimizer, seed=taken), before))


def test_numbers_that_change_in_place_are_refused_too() -> None:
    model, optimizer = built_rule("adam")
    group = optimizer.param_groups[0]
    betas = [0.9, 0.99]
    eps = torch.tensor(1e-8)
    group.update(lr=torch.tensor(0.1), betas=betas, eps=eps)
    before = step(model, optimizer, seed=2)
    for entry, write in [
        ("lr", lambda: group["lr"].fill_(NAN)),
        ("betas", lambda: betas.append(betas.pop() + 1.0)),
        ("eps", lambda: eps.neg_()),
    ]:
        usual = copy.deepcopy(group[entry])
        write()
        with pytest.raises(ValueError, match=f"{entry}="):
            step(model, optimizer, seed=3)
        group[entry] = usual
    assert_equal([*weights(model).values()], before)


def test_numbers_of_numpy_and_of_tensors_are_numbers() -> None:
    """numpy.float32 was refused before the first step, as set where the optimizer was built with an equal number."""
    final: list[list[Tensor]] = []
    for kind in (lambda x: float(np.float32(x)), np.float32, lambda x: torch.as_tensor(x).float()):
        model, optimizer = built_rule("muon")
        for seed in range(3):
            for group in optimizer.param_groups:
                group.update(
                    lr=kind(0.01 + 0.1 * seed),
                    weight_decay=kind(0.1),
                    **{
                        name: tuple(map(kind, group[name])) if name == "betas" else kind(group[name])
                        for name in ("betas", "momentum")
                        if name in group
                    },
                )
            step(model, optimizer, seed=seed)
        final.append([*weights(model).values()])
    assert_equal(final[0], final[1])
    for some, others in zip(final[0], final[2], strict=True):  # tensors of float32 are computed with in float32
        torch.testing.assert_close(some, others, rtol=1e-6, atol=1e-7)


def test_a_rate_within_rounding_of_zero_is_zero() -> None:
    """torch's LinearLR(start_factor=1 / 3, end_factor=0.0) ends 1e-17 below 0."""
    model, optimizer = built_rule("adam")
    for group in optimizer.param_groups:
        group["lr"] = -6.8e-18
    step(model, optimizer, seed=1)
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("entry", ["lr", "weight_decay"])
def test_a_number_of_one_rank_is_refused_on_all(entry: str) -> None:
    def rank_main(comm: Comm) -> list[str]:
        model = make_model()
        optimizer = get_optimizer(OptimizerConfig(lr=0.1), [model], pg_collection=roles_over(comm))
        step(model, optimizer, seed=1)
        before = [*weights(model).values()]
        refusals = []
        for value in (NAN, np.float32(0.02) if comm.rank else np.float32(0.03)):
            if comm.rank or value == value:
                optimizer.param_groups[0][entry] = value
            try:
                step(model, optimizer, seed=2)
            except (ValueError, RuntimeError) as error:
                refusals.append(f"{type(error).__name__}: {error}")
        assert_equal([*weights(model).values()], before)
        return refusals

    first, second = run_threads(2, rank_main)
    assert [refusal.partition(":")[0] for refusal in first] == ["UnusableGradientError", "HyperError"]
    assert [refusal.partition(":")[0] for refusal in second] == ["GroupError", "HyperError"]
    assert f"{entry}=nan" in second[0]


# --- loaded groups ----------------------------------------------------------------------------------------------------

MOMENTUM = partial(torch.optim.SGD, momentum=0.9)
COUPLED = {"decoupled_weight_decay": False}
SAVED_BY: dict[str, tuple[dict[str, Any], Any, Any, str]] = {  # fields; who saved what loads, and what is refused
    "amsgrad": ({}, torch.optim.AdamW, partial(torch.optim.AdamW, amsgrad=True), "amsgrad=True, .* has False"),
    "maximize": ({"optimizer": "sgd"}, MOMENTUM, partial(MOMENTUM, maximize=True), "maximize=True, .* has False"),
    "nesterov": ({"optimizer": "sgd"}, MOMENTUM, partial(MOMENTUM, nesterov=True), "nesterov=True, .* has False"),
    "coupled decay": ({}, AdamW, Adam, "decoupled_weight_decay=False, but optimizer 'adam' has True"),
    "decoupled decay": (COUPLED, Adam, AdamW, "decoupled_weight_decay=True, but optimizer 'adam' has False"),
}


@pytest.mark.parametrize(("fields", "same", "other", "message"), SAVED_BY.values(), ids=SAVED_BY)
def test_loading_compares_options_of_another_optimizer(
    fields: dict[str, Any], same: Any, other: Any, message: str
) -> None:
    """The state of an optimizer that maximized was loaded, and the flag ignored; that of torch's Adam, whose decay is
    L2, was loaded into AdamW, and refused one step later."""
    model = make_model()
    optimizer = get_optimizer(OptimizerConfig(lr=0.1, weight_decay=0.1, **fields), [model])

    def state_of(make: Any) -> dict[str, Any]:
        return make([{"params": group["params"]} for group in optimizer.param_groups]).state_dict()

    with pytest.raises(ValueError, match=f"was saved with {message}"):
        optimizer.load_state_dict(state_of(other))
    optimizer.load_state_dict(state_of(same))
    step(model, optimizer, seed=2)
