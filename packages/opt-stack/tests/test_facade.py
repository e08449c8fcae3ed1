"""The façade is a torch optimizer: in torch's schedulers and loops, with live groups, closures and hooks."""

import math
import warnings
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
from stack_models import assert_equal, backward, make_model, train, weights
from torch import nn
from torch.profiler import profile

from opt_config import ConfigError, OptimizerConfig
from opt_stack import Optimizer, get_optimizer

CONFIG = OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_grad=0.0)


# --- the step ---------------------------------------------------------------------------------------------------------


def test_it_is_a_torch_optimizer() -> None:
    model = make_model()
    model[0].bias.requires_grad_(False)
    model.tied = nn.Linear(5, 7)
    model.tied.weight = model[0].weight
    optimizer = get_optimizer(CONFIG, [model])
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert "Parameter Group 0" in repr(optimizer)
    params = [id(param) for group in optimizer.param_groups for param in group["params"]]
    assert sorted(params) == sorted({id(param) for param in model.parameters() if param.requires_grad})
    del model.tied
    seen: list[float] = []
    hooks = (optimizer.register_step_pre_hook, optimizer.register_step_post_hook)
    handles = [hook(lambda *_: seen.append(float(model[2].bias[0]))) for hook in hooks]
    before = float(model[2].bias[0])
    with profile() as profiler:
        train(model, optimizer, range(1))
    assert "Optimizer.step#Optimizer.step" in [event.key for event in profiler.key_averages()]
    assert seen == [before, float(model[2].bias[0])]
    assert seen[0] != seen[1]
    for handle in handles:
        handle.remove()
    train(model, optimizer, range(1))
    assert len(seen) == 2
    with pytest.raises(ValueError, match="layout of parameters is fixed when the optimizer is built; build a new one"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})


def test_a_parameter_that_is_unfrozen_too_late_is_reported_once() -> None:
    model = make_model()
    model[0].weight.requires_grad_(False)
    optimizer = get_optimizer(CONFIG, [model])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # while it is frozen there is nothing to tell
        train(model, optimizer, range(1))
    model[0].weight.requires_grad_(True)
    with pytest.warns(UserWarning, match=r"'0\.weight' \(and 0 more\) was frozen when the optimizer was built"):
        train(model, optimizer, range(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        train(model, optimizer, range(1))


def test_a_closure_runs_once_with_grad_enabled_before_the_step() -> None:
    model = make_model()
    other = make_model()
    optimizer = get_optimizer(CONFIG, [model], {})
    calls = []

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        backward(model, 0)
        return 0.0

    with torch.no_grad():
        assert optimizer.step(closure).success
    assert calls == [True]
    train(other, get_optimizer(CONFIG, [other], {}), range(1))
    assert_equal(weights(model), weights(other))


@pytest.mark.parametrize("read", ["scale_loss", "get_loss_scale", ""])
@pytest.mark.parametrize("loss_scale", [None, 128.0])
def test_a_closure_whose_loss_is_not_scaled_is_refused(read: str, loss_scale: float | None) -> None:
    """In Lightning with fp16=True, gradients were divided by a scale that no loss had: the model hardly learned."""
    model = make_model(torch.float16)
    optimizer = get_optimizer(OptimizerConfig(lr=1e-2, fp16=True, loss_scale=loss_scale), [model], {})
    scales: dict[str, Any] = {
        "scale_loss": optimizer.scale_loss,
        "get_loss_scale": lambda loss: loss * optimizer.get_loss_scale()[0],
    }
    optimizer.scale_loss(torch.zeros(()))  # in an earlier iteration

    def closure() -> float:
        backward(model, 0, scale=scales.get(read))
        return 0.0

    before = weights(model)
    if read:
        optimizer.step(closure)
        return
    with pytest.raises(ValueError, match=r"the closure has not called optimizer.scale_loss\(loss\); call it before"):
        optimizer.step(closure)
    assert_equal(weights(model), before)


@pytest.mark.parametrize("fields", [{"fp16": True}, {"loss_scale": 64.0}], ids=str)
def test_torchs_scaler_beside_a_loss_scale_is_refused(fields: dict[str, Any]) -> None:
    """Symptom: gradients were divided by both scales, and the model hardly learned."""
    model = make_model()
    optimizer = get_optimizer(OptimizerConfig(lr=1e-2, **fields), [model])
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    backward(model, 0, scale=scaler.scale)
    before = weights(model)
    with pytest.raises(
        ConfigError, match=r"torch's GradScaler with fp16=.*, loss_scale=.*: gradients would be divided"
    ):
        scaler.step(optimizer)
    assert_equal(weights(model), before)


def test_a_second_clip_of_an_iteration_changes_its_norm_only() -> None:
    """Symptom: the step began again: by the next loss scale, and without the loss that was noted."""
    config = OptimizerConfig(lr=0.1, optimizer="sgd", fp16=True, initial_loss_scale=4.0, loss_scale_window=1)
    found = []
    for norms in ([0.5], [1e9, 0.5]):
        model = make_model()
        optimizer = get_optimizer(config, [model])
        results = []
        for iteration in range(2):
            backward(model, iteration, scale=optimizer.scale_loss)
            optimizer.note_loss(torch.tensor(math.nan if iteration else 1.0))
            results += [optimizer.clip_grad_norm_(norm) for norm in norms][-1:]
            results.append(optimizer.step().success)
            optimizer.zero_grad()
        found.append((results, float(optimizer.get_loss_scale()), weights(model)))
    assert found[0][0][1::2] == [True, False]
    assert_equal(found[1], found[0])


CLEARS: dict[str, Any] = {
    "set to None": lambda model, optimizer: model.zero_grad(),
    "zeroed": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "none": lambda model, optimizer: None,
}


@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize("clear", CLEARS)
def test_a_skipped_iteration_is_not_the_next_one(clear: str, clips: bool) -> None:
    """Symptom: unless the optimizer cleared the gradients, the norm was that of the skipped iteration for ever."""

    def prepare(optimizer: Optimizer) -> object:
        return optimizer.clip_grad_norm_(1.0) if clips else optimizer.prepare_grads()

    norms = []
    for skips in (True, False):
        model = make_model()
        optimizer = get_optimizer(CONFIG, [model])
        backward(model, 0)
        if skips:
            prepare(optimizer)
        CLEARS[clear](model, optimizer)
        backward(model, 1)
        prepare(optimizer)
        norms.append(optimizer.get_grad_norm())
    assert norms[0] == norms[1]


def test_gradients_that_are_ready_are_not_prepared_again() -> None:
    """Symptom: they were divided by the next loss scale, and counted twice."""
    model = make_model()
    optimizer = get_optimizer(CONFIG, [model])
    before = weights(model)
    backward(model, 0)
    optimizer.prepare_grads()
    for again in (optimizer.step, optimizer.prepare_grads, lambda: optimizer.clip_grad_norm_(1.0)):
        with pytest.raises(RuntimeError, match=r"gradients are ready: call step_with_ready_grads\(\)"):
            again()
    assert_equal(weights(model), before)
    optimizer.zero_grad()
    train(model, optimizer, range(1))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_cleared_gradients_are_not_ready(set_to_none: bool) -> None:
    """Symptom: the second half of the step updated with zeros."""
    model = make_model()
    optimizer = get_optimizer(CONFIG, [model])
    before = weights(model)
    backward(model, 0)
    optimizer.prepare_grads()
    optimizer.zero_grad(set_to_none=set_to_none)
    with pytest.raises(RuntimeError, match="no gradients are ready"):
        optimizer.step_with_ready_grads()
    assert_equal(weights(model), before)


def test_two_halves_are_a_step() -> None:
    model = make_model()
    other = make_model()
    optimizer = get_optimizer(CONFIG, [model], {})
    backward(model, 0)
    assert (optimizer.prepare_grads(), optimizer.step_with_ready_grads()) == (False, True)
    train(other, get_optimizer(CONFIG, [other], {}), range(1))
    assert_equal(weights(model), weights(other))


def test_half_a_step_is_refused_without_ready_or_small_grads() -> None:
    model = make_model()
    optimizer = get_optimizer(OptimizerConfig(lr=0.1, grad_norm_skip_threshold=1e-3), [model])
    before = weights(model)
    backward(model, 0)
    assert (optimizer.prepare_grads(), optimizer.step_with_ready_grads()) == (False, False)
    assert_equal(weights(model), before)
    backward(model, 0, scale=lambda loss: loss * math.inf)
    assert not optimizer.step().success
    for ask in (
        lambda: optimizer.get_grad_norm(3.0),
        lambda: optimizer.clip_grad_norm(1.0),
        optimizer.count_zeros,
        optimizer.step_with_ready_grads,
    ):
        with pytest.raises(RuntimeError, match="no gradients are ready"):
            ask()


def test_the_spans_have_megatron_cores_names() -> None:
    calls: list[tuple[str, str, Any]] = []

    def timers(name: str, log_level: int = 0) -> Any:
        return SimpleNamespace(
            start=lambda *, barrier: calls.append((name, "start", barrier)),
            stop=lambda: calls.append((name, "stop", None)),
        )

    model = make_model()
    optimizer = get_optimizer(OptimizerConfig(lr=1e-2, timers=timers, barrier_with_L1_time=True), [model])
    train(model, optimizer, range(1))
    names = (
        "optimizer-copy-to-main-grad optimizer-unscale-and-check-inf optimizer-clip-main-grad "
        "optimizer-inner-step params-all-gather"
    )
    assert calls == [call for name in names.split() for call in ((name, "start", True), (name, "stop", None))]


@pytest.mark.parametrize("rule", ["adam", "muon"])
def test_sharding_on_one_rank_is_accepted(rule: str) -> None:
    models = [make_model(), make_model()]
    name = {"adam": "", "muon": "layer_wise_"}[rule]
    for model, fields in zip(models, ({}, {f"use_{name}distributed_optimizer": True})):
        train(model, get_optimizer(OptimizerConfig(optimizer=rule, lr=1e-2, **fields), [model]), range(2))
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


# --- in torch's own loops ---------------------------------------------------------------------------------------------


SCHEDULERS: dict[str, Any] = {
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.02, total_steps=8),  # moves beta1 as well
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.LinearLR(o, 0.1, 1.0, 3), torch.optim.lr_scheduler.StepLR(o, 2)], milestones=[3]
    ),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
def test_torchs_schedulers_drive_it(scheduler: Any) -> None:
    ours = make_model()
    theirs = make_model()
    adamw = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.1)
    optimizers = [get_optimizer(CONFIG, [ours], {}), adamw]
    schedulers = [scheduler(optimizer) for optimizer in optimizers]
    for step in range(6):
        for model, optimizer, schedule in zip((ours, theirs), optimizers, schedulers, strict=True):
            train(model, optimizer, range(step, step + 1))
            schedule.step()
        assert optimizers[0].param_groups[0]["lr"] == optimizers[1].param_groups[0]["lr"]
    # The same arithmetic in another grouping of operations: one rounding, 2**-24, a step, of weights of order one.
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-6, atol=1e-7)


def test_schedule_free_warns_of_a_warmup_outside_of_it() -> None:
    model = make_model()
    optimizer = get_optimizer(OptimizerConfig(optimizer="schedule_free", lr=1e-2, weight_decay=0.0), [model], {})
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 3, 1.0))
    train(model, optimizer, range(1))
    schedule.step()
    with pytest.warns(UserWarning, match=r"the lr of group \d rose from .* set warmup_steps in place of a schedule"):
        train(model, optimizer, range(1, 2))


def test_a_learning_rate_may_be_a_tensor() -> None:
    ours = make_model()
    theirs = make_model()
    optimizer = get_optimizer(CONFIG, [ours], {})
    other = get_optimizer(CONFIG, [theirs], {})
    rate = torch.tensor(1e-2)
    optimizer.param_groups[0]["lr"] = rate
    for step, lr in enumerate((1e-2, 4e-3, 2e-3)):
        rate.fill_(lr)
        other.param_groups[0]["lr"] = rate.item()
        train(ours, optimizer, range(step, step + 1))
        train(theirs, other, range(step, step + 1))
    # The rate is rounded to fp32 at another place of the formula than the Python float.
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-6, atol=1e-7)
    optimizer.load_state_dict(other.state_dict())
    assert optimizer.param_groups[0]["lr"] is rate


# --- what it holds ----------------------------------------------------------------------------------------------------


def test_a_parameter_moved_to_another_group_is_refused() -> None:
    """Updates would use the numbers of the former group."""
    model = make_model()
    optimizer = get_optimizer(CONFIG, [model])
    backward(model, 0)
    first, second = optimizer.param_groups
    second["params"].insert(0, first["params"].pop())
    with pytest.raises(ValueError, match="param_groups hold other parameters than those that this optimizer was built"):
        optimizer.step()


def test_a_plan_of_fp32_dense_and_bf16_experts_can_be_printed() -> None:
    """A router in fp32 with experts in bf16: the dense unit has no bf16 parameter, the experts' no fp32 one."""
    model = nn.ModuleDict({"router": nn.Linear(4, 3, bias=False), "expert": nn.Linear(4, 5, bias=False).bfloat16()})
    model["expert"].weight.allreduce = False
    optimizer = get_optimizer(OptimizerConfig(lr=0.01, bf16=True), [model])
    # Adam's two fp32 moments for every element, and an fp32 copy of those in bf16.
    assert optimizer.plan.state_bytes() == 12 * 8 + 20 * (4 + 8)
    assert optimizer.plan.state_bytes() == sum(unit.state_bytes() for unit in optimizer.stepper.units)
    assert "adam/experts updates 1 parameters, 20 elements" in str(optimizer.plan)
    assert torch.float32 not in next(unit for unit in optimizer.plan.units if unit.is_expert).numbers


@pytest.mark.parametrize("fields", [{}, {"bf16": True}, {"optimizer": "muon"}], ids=str)
def test_a_step_keeps_no_gradient_alive(fields: dict[str, Any]) -> None:
    """After `zero_grad`, their memory is needed for activations."""
    config = OptimizerConfig(lr=1e-2, **fields)
    model = make_model(config.precision.params)
    optimizer = get_optimizer(config, [model])
    train(model, optimizer, range(3))
    grads = [ref(param.grad) for param in model.parameters()]
    optimizer.zero_grad()
    assert [grad() for grad in grads] == [None] * len(grads)
