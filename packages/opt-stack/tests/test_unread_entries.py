"""Numbers that no rule in use reads: refused in the configuration, in overrides, and when a group gets them later."""

import re
from typing import Any

import pytest
import torch
from stack_models import make_model, train, weights
from torch import nn

from opt_config import ConfigError, OptimizerConfig, ParamKey
from opt_distributed.comm.collectives import Alone
from opt_distributed.comm.groups import Axes, Roles
from opt_distributed.comm.threads import ThreadComm, run_threads
from opt_kernels.formulas import Formula, Number, State, fma
from opt_kernels.hooks import CautiousDecay, ClipUpdateRms, Hook
from opt_scheduler import OptimizerParamScheduler
from opt_stack import Optimizer, Registry, get_optimizer, get_optimizer_based_on_param_groups


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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weight_decay": 0.1}, "group 'default': weight_decay=0.1 has no effect: formula 'undecayed' never reads it"),
        ({"optimizer_options": {"betas": (0.9, 0.5)}}, "formula 'undecayed' never reads beta2; leave it at 0.99"),
        ({"adam_beta2": 0.5}, "adam_beta2=0.5: optimizer='undecayed' does not read it; set its numbers in optimizer"),
        ({"optimizer": "adan", "adam_eps": 0.5}, "adam_eps=0.5: optimizer='adan' does not read it"),
        ({"optimizer": "signum", "sgd_momentum": 0.5}, "sgd_momentum=0.5: optimizer='signum' does not read it"),
    ],
    ids=str,
)
def test_a_number_that_no_rule_reads_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        built(**fields)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("lr", "a field of the configuration sets it"),
        ("backend", "the stack chooses the fastest backend"),
        ("stochastic_rounding", "the stack keeps main values; only the drop-in optimizers"),
    ],
)
def test_an_option_that_is_not_the_formulas_is_refused_with_the_reason(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{name!r}=1; for optimizer='undecayed' {reason}")):
        built(optimizer_options={name: 1})


def test_an_override_and_a_callers_group_are_refused_too() -> None:
    with pytest.raises(ConfigError, match=re.escape("end_wd=0.1 has no effect: formula 'undecayed' never reads it")):
        built(overrides={ParamKey(name="bias"): {"start_wd": 0.0, "end_wd": 0.1}})
    model = nn.Linear(4, 4)
    groups = [{"params": list(model.parameters()), "weight_decay": 0.3}]
    with pytest.raises(ConfigError, match=re.escape("weight_decay=0.3 has no effect")):
        get_optimizer_based_on_param_groups(
            OptimizerConfig(optimizer="undecayed", lr=0.5), [model], groups, rules=RULES
        )


def test_defaults_and_what_a_rule_or_hook_reads_are_accepted() -> None:
    built()
    built(weight_decay=0.0, optimizer_options={"betas": (0.5, 0.99)})
    built(CautiousDecay(), weight_decay=0.1)
    built(overrides={ParamKey(name="bias"): {"optimizer": "adam"}}, adam_beta1=0.5)
    built(optimizer="sgd", adam_beta1=0.5)  # as in Megatron-Core, whose scripts set numbers of all its rules


def test_the_default_weight_decay_has_no_effect_with_a_hook_either() -> None:
    weights = []
    for hooks in ((), (ClipUpdateRms(1e6),)):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = built(*hooks, model=model)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        weights.append(model.weight.detach().clone())
    torch.testing.assert_close(*weights, rtol=0, atol=1e-7)  # decay would change them by 0.005 of each


def built_groups(hooks: tuple[Hook, ...] = (), comm: Any = None, **fields: Any) -> tuple[nn.Module, Optimizer]:
    model = make_model()
    axes = Axes(dp=comm or Alone(), tp=Alone())
    config = OptimizerConfig(optimizer="undecayed", lr=0.1, **fields)
    roles = Roles(dense=axes, expert=axes, everyone=comm or Alone())
    rules = Registry().with_formula(UNDECAYED)
    return model, get_optimizer(config, [model], rules=rules, hooks=hooks, pg_collection=roles)


def scheduler(optimizer: Optimizer, start: float, end: float) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optimizer, init_lr=0.1, max_lr=0.1, min_lr=0.1, lr_warmup_steps=0, lr_decay_steps=4, lr_decay_style="constant",
        start_wd=start, end_wd=end, wd_incr_steps=4, wd_incr_style="constant" if start == end else "linear",
    )  # fmt: skip


def test_a_schedule_of_weight_decay_that_nothing_reads_is_refused_before_anything_changes() -> None:
    model, optimizer = built_groups()
    schedule = scheduler(optimizer, 0.01, 0.1)
    train(model, optimizer, range(1))
    before = weights(model)
    schedule.step(1)
    with pytest.raises(ValueError, match=r"weight_decay=0\.03\d* has no effect: formula 'undecayed' never reads it"):
        train(model, optimizer, range(1, 2))
    assert all(torch.equal(before[name], value) for name, value in weights(model).items())


@pytest.mark.parametrize("decay", [0.0, 0.01], ids=["none", "the default"])
def test_a_constant_weight_decay_that_nothing_reads_is_accepted(decay: float) -> None:
    model, optimizer = built_groups(weight_decay=decay)
    schedule = scheduler(optimizer, decay, decay)
    for step in range(3):
        train(model, optimizer, range(step, step + 1))
        schedule.step(1)


def test_a_hook_that_decays_reads_it() -> None:
    model, optimizer = built_groups((CautiousDecay(),))
    schedule = scheduler(optimizer, 0.01, 0.1)
    for step in range(3):
        train(model, optimizer, range(step, step + 1))
        schedule.step(1)


def test_betas_that_nothing_reads_are_refused_and_loaded_numbers_are_not() -> None:
    model, optimizer = built_groups()
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


def test_every_rank_refuses_what_one_wrote() -> None:
    def rank_main(comm: ThreadComm) -> str:
        model, optimizer = built_groups(comm=comm, use_distributed_optimizer=True)
        if comm.rank == 1:
            optimizer.param_groups[0]["weight_decay"] = 0.2
        before = weights(model)
        with pytest.raises((ValueError, RuntimeError)) as caught:
            train(model, optimizer, range(1))
        assert all(torch.equal(before[name], value) for name, value in weights(model).items())
        return str(caught.value)

    other, own = run_threads(2, rank_main)
    assert "other rank" in other
    assert "weight_decay=0.2 has no effect" in own
