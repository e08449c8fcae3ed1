"""Entries of groups: what neither a rule nor a scheduler reads is refused; a user's rule declares what it reads."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from stack_models import assert_equal, make_model, train, weights

from opt_config import ConfigError, OptimizerConfig, ParamKey
from opt_kernels.rules.elementwise import ElementwiseRule
from opt_kernels.rules.sgd import SGD
from opt_scheduler import FieldScheduler, OptimizerParamScheduler, linear
from opt_stack import Registry, RuleEntry, get_optimizer, get_optimizer_based_on_param_groups

CONFIG = OptimizerConfig(lr=1e-2, weight_decay=0.1)
BIAS = ParamKey(name="*.bias")


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


def powered(**hyper: Any) -> Registry:
    return Registry().with_rule(
        RuleEntry(
            name="powered",
            summary="SGD times alpha",
            make=lambda config: Powered(formula=SGD(momentum_buffer=False).formula),
            hyper=lambda config: {"momentum": 0.0, **hyper},
        )
    )


# --- overrides --------------------------------------------------------------------------------------------------------


def test_a_misspelt_override_is_refused_with_the_group_and_the_nearest_name() -> None:
    # wd_mul was put into the group and every bias decayed, though "nothing is ignored".
    with pytest.raises(ConfigError) as caught:
        get_optimizer(CONFIG, [make_model()], {BIAS: {"wd_mul": 0}})
    message = str(caught.value)
    assert message.startswith("group '*.bias': wd_mul=0: unknown entry; nothing reads it. Allowed are betas, ")
    assert "Did you mean wd_mult or lr_mult?" in message


@pytest.mark.parametrize(
    ("optimizer", "override", "message"),
    [
        (
            "adam",
            {"momentum": 0.5},
            "optimizer 'adam' does not read it; it reads lr, weight_decay, betas, eps",
        ),
        (
            "sgd",
            {"betas": (0.5, 0.5)},
            "optimizer 'sgd' does not read it; it reads lr, weight_decay, dampening, momentum",
        ),
        ("adam", {"amsgrad": True}, "amsgrad=True: not supported by optimizer 'adam'; False is allowed"),
    ],
)
def test_a_number_that_the_rule_does_not_read_is_refused(
    optimizer: str, override: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        get_optimizer(OptimizerConfig(optimizer=optimizer, lr=1e-2), [make_model()], {BIAS: override})
    assert message in str(caught.value)


def test_one_override_may_cover_parameters_of_several_rules() -> None:
    config = OptimizerConfig(optimizer="muon", lr=1e-2)
    optimizer = get_optimizer(config, [make_model()], {ParamKey(name="0.*"): {"betas": (0.5, 0.6), "momentum": 0.5}})
    by_rule = {g["optimizer"]: g for g in optimizer.param_groups if g["name"].startswith("0.")}
    assert by_rule["muon"]["momentum"] == 0.5


def test_entries_of_ones_own_may_be_declared() -> None:
    optimizer = get_optimizer(CONFIG, [make_model()], {BIAS: {"role": "bias"}}, extra_group_keys=("role",))
    assert [group.get("role") for group in optimizer.param_groups] == [None, "bias"]


# --- groups of one's own ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"wd_mul": 0.0}, "group 'group 0': wd_mul=0.0: unknown entry"),
        ({"use_muon": False}, "group 'group 0': use_muon=False: unknown entry"),
        ({"maximize": True}, "group 'group 0': maximize=True: not supported by optimizer 'adam'; False is allowed"),
        ({"betas": (0.9, 1.5)}, "group 'group 0': betas=(0.9, 1.5): must be a tuple of numbers in [0, 1)"),
        ({"lr": -1.0}, "group 'group 0': lr=-1.0: must be at least 0 and finite"),
        ({"lr": 1e-3, "lr_mult": 0.5}, "group 'group 0' has lr=0.001 and lr_mult=0.5"),
    ],
)
def test_groups_with_entries_that_nothing_reads_are_refused(entries: dict[str, Any], message: str) -> None:
    model = make_model()
    with pytest.raises(ConfigError) as caught:
        get_optimizer_based_on_param_groups(CONFIG, [model], [{"params": list(model.parameters()), **entries}])
    assert message in str(caught.value)


def test_multipliers_of_a_group_count() -> None:
    model = make_model()
    given = {"params": list(model.parameters()), "lr_mult": 0.5, "wd_mult": 0.5, "start_wd": 0.4, "end_wd": 0.4}
    (group,) = get_optimizer_based_on_param_groups(CONFIG, [model], [given]).param_groups
    assert (group["lr"], group["max_lr"], group["weight_decay"]) == (5e-3, 5e-3, 0.2)


def test_the_groups_of_a_torch_optimizer_are_taken() -> None:
    model = make_model()
    given = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True).param_groups
    (group,) = get_optimizer_based_on_param_groups(CONFIG, [model], given).param_groups
    assert group["lr"] == 1e-3


def _torch_one_cycle(optimizer: Any) -> None:
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=10)


def _torch_cosine(optimizer: Any) -> None:
    torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)


def _relative(optimizer: Any) -> None:
    FieldScheduler(optimizer, {"lr": linear(1.0, 0.0, steps=10), "eps": linear(1.0, 0.5, steps=10)}, relative=True)


def _megatron(optimizer: Any) -> None:
    OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=1e-2, min_lr=0.0, lr_warmup_steps=0, lr_decay_steps=10, lr_decay_style="linear",
        start_wd=0.1, end_wd=0.1, wd_incr_steps=10, wd_incr_style="constant",
    )  # fmt: skip


@pytest.mark.parametrize("schedule", [_torch_one_cycle, _torch_cosine, _relative, _megatron])
def test_what_schedulers_add_to_groups_is_taken(schedule: Any) -> None:
    model = make_model()
    first = get_optimizer(CONFIG, [model])
    schedule(first)
    again = get_optimizer_based_on_param_groups(CONFIG, [model], first.param_groups)
    assert [set(group) for group in again.param_groups] == [set(group) for group in first.param_groups]


# --- rules of one's own -----------------------------------------------------------------------------------------------


def test_a_rule_reads_a_number_that_it_declares_and_an_override_reaches_it() -> None:
    config = OptimizerConfig(optimizer="powered", lr=0.5, weight_decay=0.0, clip_grad=0.0)
    plain = OptimizerConfig(optimizer="sgd", sgd_momentum=0.0, lr=0.5, weight_decay=0.0, clip_grad=0.0)
    model, other = make_model(), make_model()
    start = weights(model)
    optimizer = get_optimizer(config, [model], {BIAS: {"alpha": 4.0}}, rules=powered(alpha=2.0))
    assert [group["alpha"] for group in optimizer.param_groups] == [2.0, 4.0]
    train(model, optimizer, range(1))
    train(other, get_optimizer(plain, [other]), range(1))
    for name, weight in weights(model).items():
        factor = 4.0 if name.endswith("bias") else 2.0
        torch.testing.assert_close(weight - start[name], factor * (weights(other)[name] - start[name]))


def test_a_number_of_a_rules_own_is_saved_and_loaded() -> None:
    config = OptimizerConfig(optimizer="powered", lr=0.5, clip_grad=0.0)
    model, other = make_model(), make_model()
    saved = get_optimizer(config, [model], {}, rules=powered(alpha=3.0)).state_dict()
    resumed = get_optimizer(config, [other], {}, rules=powered(alpha=2.0))
    resumed.load_state_dict(saved)
    assert [group["alpha"] for group in resumed.param_groups] == [3.0]
    train(other, resumed, range(1))
    expected = make_model()
    train(expected, get_optimizer(config, [expected], {}, rules=powered(alpha=3.0)), range(1))
    assert_equal(weights(other), weights(expected))


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        (
            {"alpha": 1.0, "beta": 0.9},
            "optimizer='powered': RuleEntry.hyper returns 'beta', which its rule never reads; allowed are betas, eps, "
            "momentum, alpha. Did you mean betas? A rule reads further numbers from Hyper.own if it names them: "
            "hyper_names = ('beta',)",
        ),
        (
            {},
            "optimizer='powered': its rule reads 'alpha' (hyper_names), but RuleEntry.hyper returns no value for it; "
            "return the initial value of groups",
        ),
    ],
    ids=["never read", "missing"],
)
def test_what_an_entry_gives_and_a_rule_reads_must_agree(hyper: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        get_optimizer(OptimizerConfig(optimizer="powered", lr=0.5), [make_model()], rules=powered(**hyper))
    assert str(caught.value) == message
