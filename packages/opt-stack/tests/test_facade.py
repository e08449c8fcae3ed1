"""The façade is a torch optimizer: in torch's schedulers and loops, with live groups, closures and hooks."""

import math
import re
import warnings
from typing import Any

import pytest
import torch
from stack_models import assert_equal, backward, make_model, train, weights
from torch import nn
from torch.profiler import profile

from opt_config import OptimizerConfig, ParamKey
from opt_distributed import run_threads
from opt_distributed.comm import Alone, Axes, Roles
from opt_distributed.comm.threads import ThreadComm
from opt_stack import Optimizer, StepResult, get_optimizer

CONFIG = OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_grad=0.0)


def torch_adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, "weight_decay": 0.1, **options})


def assert_trains_alike(ours: nn.Module, theirs: nn.Module) -> None:
    # The same arithmetic in another grouping of operations: one rounding, 2**-24, a step, of weights of order one.
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-6, atol=1e-7)


# --- the step ---------------------------------------------------------------------------------------------------------


def test_it_is_a_torch_optimizer() -> None:
    optimizer = get_optimizer(CONFIG, [make_model()])
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(optimizer, Optimizer)
    assert "Parameter Group 0" in repr(optimizer)


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


@pytest.mark.parametrize(
    ("dtype", "changes"),
    [
        pytest.param(torch.float32, {}, id="fp32"),
        pytest.param(torch.bfloat16, {"bf16": True}, id="bf16"),
        pytest.param(torch.float16, {"fp16": True, "initial_loss_scale": 8.0}, id="fp16"),
        pytest.param(torch.float32, {"log_num_zeros_in_grad": True}, id="zeros"),
        pytest.param(torch.float32, {"clip_grad": 1.0}, id="clip"),
    ],
)
def test_a_step_gives_the_same_types_whatever_is_configured(dtype: torch.dtype, changes: dict[str, Any]) -> None:
    model = make_model(dtype)
    optimizer = get_optimizer(OptimizerConfig(lr=1e-2, **changes), [model])
    backward(model, 0, scale=optimizer.scale_loss)
    result = optimizer.step()
    assert isinstance(result, StepResult)
    success, grad_norm, num_zeros = result
    assert success is True
    assert type(grad_norm) is float
    assert type(num_zeros) is (int if "log_num_zeros_in_grad" in changes else type(None))


def test_the_zeros_of_all_gradients_are_counted() -> None:
    model = make_model()
    optimizer = get_optimizer(OptimizerConfig(lr=1e-2, log_num_zeros_in_grad=True), [model])
    for number, param in enumerate(model.parameters()):
        param.grad = torch.ones_like(param)
        param.grad.view(-1)[: number + 1] = 0.0
    assert optimizer.step().num_zeros_in_grad == 1 + 2 + 3 + 3  # the last has three elements


def test_a_parameter_that_misses_a_step_counts_its_own_from_then_on() -> None:
    """Adam's bias correction is by a parameter's own steps, as in torch."""
    ours, theirs = make_model(), make_model()
    optimizer = get_optimizer(OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_grad=0.0), [ours], {})
    peer = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(5):
        for number, params in enumerate(zip(ours.parameters(), theirs.parameters(), strict=True)):
            missing = (step, number) in {(2, 1), (3, 2)}
            for param in params:
                param.grad = None if missing else torch.full_like(param, (step - 2.5) * (number + 1))
        assert optimizer.step().success
        peer.step()
    for got, want in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)  # updates of 1e-2, each rounded equally to 2**-24


def test_a_closure_runs_once_with_gradients_enabled_before_the_step() -> None:
    model, other = make_model(), make_model()
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
    scales = {
        "scale_loss": optimizer.scale_loss,
        "get_loss_scale": lambda loss: loss * optimizer.get_loss_scale()[0],
        "": None,
    }
    optimizer.scale_loss(torch.zeros(()))  # in an earlier iteration

    def closure() -> float:
        backward(model, 0, scale=scales[read])
        return 0.0

    before = weights(model)
    if read:
        optimizer.step(closure)
        return
    with pytest.raises(ValueError, match=r"the closure has not called optimizer.scale_loss\(loss\); call it before"):
        optimizer.step(closure)
    assert_equal(weights(model), before)


def test_the_halves_of_a_step_make_a_step() -> None:
    model, other = make_model(), make_model()
    halves, whole = get_optimizer(CONFIG, [model], {}), get_optimizer(CONFIG, [other], {})
    for step in range(3):
        for each in (model, other):
            each.zero_grad()
            backward(each, step)
        assert halves.prepare_grads() is False
        assert halves.step_with_ready_grads() is True
        assert halves.get_grad_norm() == whole.step().grad_norm
    assert_equal(weights(model), weights(other))


@pytest.mark.parametrize(
    "ask",
    [
        lambda optimizer: optimizer.get_grad_norm(3.0),
        lambda optimizer: optimizer.clip_grad_norm(1.0),
        lambda optimizer: optimizer.count_zeros(),
        lambda optimizer: optimizer.step_with_ready_grads(),
    ],
    ids=["another norm", "clip", "zeros", "update"],
)
def test_after_a_step_that_overflowed_no_gradients_are_ready(ask: Any) -> None:
    model = make_model()
    optimizer = get_optimizer(OptimizerConfig(lr=0.1), [model])
    backward(model, 0, scale=lambda loss: loss * math.inf)
    assert not optimizer.step().success
    with pytest.raises(RuntimeError, match="no gradients are ready"):
        ask(optimizer)


def test_a_norm_above_the_threshold_refuses_the_step() -> None:
    model = make_model()
    optimizer = get_optimizer(OptimizerConfig(lr=1e-2, grad_norm_skip_threshold=2.0), [model])
    before = weights(model)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    result = optimizer.step()
    assert result.success is False
    assert result.grad_norm == pytest.approx(math.sqrt(sum(p.numel() for p in model.parameters())))
    assert_equal(weights(model), before)
    backward(model, 0)
    optimizer.zero_grad()
    backward(model, 0)
    assert optimizer.step().success is True


def test_the_spans_have_megatron_cores_names() -> None:
    calls: list[tuple[str, str, Any]] = []

    class Timer:
        def __init__(self, name: str) -> None:
            self.name = name

        def start(self, *, barrier: bool) -> None:
            calls.append((self.name, "start", barrier))

        def stop(self) -> None:
            calls.append((self.name, "stop", None))

    def timers(name: str, log_level: int = 0) -> Timer:
        return Timer(name)

    model = make_model()
    optimizer = get_optimizer(OptimizerConfig(lr=1e-2, timers=timers, barrier_with_L1_time=True), [model])
    train(model, optimizer, range(1))
    names = [
        *("optimizer-copy-to-main-grad", "optimizer-unscale-and-check-inf", "optimizer-clip-main-grad"),
        *("optimizer-inner-step", "params-all-gather"),
    ]
    assert calls == [call for name in names for call in ((name, "start", True), (name, "stop", None))]


# --- in torch's own loops ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scheduler",
    [
        pytest.param(lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.5**step), id="LambdaLR"),
        pytest.param(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 6), id="CosineAnnealingLR"),
        pytest.param(lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.02, total_steps=8), id="OneCycleLR"),
        pytest.param(
            lambda o: torch.optim.lr_scheduler.SequentialLR(
                o,
                [torch.optim.lr_scheduler.LinearLR(o, 0.1, 1.0, 3), torch.optim.lr_scheduler.StepLR(o, 2)],
                milestones=[3],
            ),
            id="SequentialLR",
        ),
    ],
)
def test_torchs_schedulers_drive_it(scheduler: Any) -> None:
    """OneCycleLR moves beta1 as well."""
    ours, theirs = make_model(), make_model()
    optimizers = [get_optimizer(CONFIG, [ours], {}), torch_adamw(theirs)]
    schedulers = [scheduler(optimizer) for optimizer in optimizers]
    for step in range(6):
        for model, optimizer, schedule in zip((ours, theirs), optimizers, schedulers, strict=True):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
            schedule.step()
        assert optimizers[0].param_groups[0]["lr"] == optimizers[1].param_groups[0]["lr"]
    assert_trains_alike(ours, theirs)


def test_live_edits_of_groups_count_from_the_next_step() -> None:
    ours, theirs = make_model(), make_model()
    optimizers = [get_optimizer(CONFIG, [ours], {}), torch_adamw(theirs)]
    edits: list[dict[str, Any]] = [{}, {"lr": 3e-3}, {"betas": (0.5, 0.9)}, {"weight_decay": 0.7}, {"eps": 1e-3}]
    for step, edit in enumerate(edits):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.param_groups[0].update(edit)
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
    assert_trains_alike(ours, theirs)


def test_a_learning_rate_may_be_a_tensor() -> None:
    ours, theirs = make_model(), make_model()
    optimizer, other = get_optimizer(CONFIG, [ours], {}), get_optimizer(CONFIG, [theirs], {})
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


def test_frozen_parameters_are_in_no_group_and_tied_ones_are_in_one() -> None:
    model = make_model()
    model[0].bias.requires_grad_(False)
    model.tied = nn.Linear(5, 7)
    model.tied.weight = model[0].weight
    optimizer = get_optimizer(CONFIG, [model])
    held = [param for group in optimizer.param_groups for param in group["params"]]
    assert len(held) == len({id(param) for param in held}) == 4
    assert not any(param is model[0].bias for param in held)
    assert sum(param is model[0].weight for param in held) == 1


def test_parameters_cannot_be_added_later() -> None:
    optimizer = get_optimizer(CONFIG, [make_model()])
    with pytest.raises(ValueError, match="layout of parameters is fixed when the optimizer is built; build a new one"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})


def test_main_values_follow_weights_that_were_loaded_from_elsewhere() -> None:
    model = make_model(torch.bfloat16)
    optimizer = get_optimizer(OptimizerConfig(lr=1e-2, bf16=True), [model], {})
    with torch.no_grad():
        model[0].weight.fill_(0.25)
    optimizer.reload_model_params()
    assert {value.dtype for value in optimizer.get_parameters()} == {torch.float32}
    assert_equal(optimizer.get_parameters()[0], torch.full((7, 5), 0.25))
    precise = {name: torch.full(p.shape, 1 / 3, dtype=torch.float64) for name, p in model.named_parameters()}
    optimizer.reload_model_params(precise)
    assert_equal(optimizer.get_parameters()[0], torch.full((7, 5), 1 / 3))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (..., "state_dict lacks '0.weight' of model chunk 0"),
        (None, "state_dict's '0.weight' of model chunk 0 is a NoneType; it must be a tensor of shape (7, 5)"),
        (torch.ones(3), "state_dict's '0.weight' of model chunk 0 has shape (3,); the parameter's is (7, 5)"),
        (torch.ones(5, 7), "state_dict's '0.weight' of model chunk 0 has shape (5, 7); the parameter's is (7, 5)"),
    ],
)
def test_a_state_that_does_not_fit_changes_no_main_value_on_any_rank(value: Any, message: str) -> None:
    """A rank that did not own the parameter took the rest of the state; a transposed matrix was taken by all."""
    state: dict[str, Any] = {name: torch.ones(p.shape) for name, p in make_model().named_parameters()}
    state["0.weight"] = value
    if value is ...:
        del state["0.weight"]

    def rank_main(comm: ThreadComm) -> None:
        axes = Axes(dp=comm, tp=Alone())
        roles = Roles(dense=axes, expert=axes, everyone=comm)
        config = OptimizerConfig(lr=1e-2, bf16=True, use_distributed_optimizer=True)
        optimizer = get_optimizer(config, [make_model(torch.bfloat16)], {}, pg_collection=roles)
        before = [main.clone() for main in optimizer.get_parameters()]
        with pytest.raises(ValueError, match=re.escape(message)):
            optimizer.reload_model_params(state)
        assert_equal(optimizer.get_parameters(), before)

    run_threads(3, rank_main)


def test_overrides_reach_their_parameters_only() -> None:
    model = make_model()
    optimizer = get_optimizer(CONFIG, [model], {ParamKey(name="*.bias"): {"wd_mult": 0.0, "max_lr": 1.0}})
    assert [(g["name"], g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [
        ("default", 1e-2, 0.1),
        ("*.bias", 1.0, 0.0),
    ]


@pytest.mark.parametrize("step", ["step", "prepare_grads"])
def test_parameters_exchanged_in_the_groups_are_refused_at_the_next_step(step: str) -> None:
    # Accelerate's FSDP2 assigns sharded parameters to the groups: every step said success, and none of them moved.
    model = make_model()
    optimizer = get_optimizer(OptimizerConfig(lr=1e-2), [model])
    backward(model, 0)
    for group in optimizer.param_groups:
        group["params"] = [torch.nn.Parameter(param.detach().clone()) for param in group["params"]]
    with pytest.raises(ValueError, match="param_groups hold other parameters than those that this optimizer was built"):
        getattr(optimizer, step)()


def built() -> tuple[nn.Linear, Optimizer]:
    model = nn.Linear(2, 3)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    return model, get_optimizer(OptimizerConfig(lr=0.1), [model])


def test_hooks_run_around_a_step_while_they_are_registered() -> None:
    model, optimizer = built()
    seen: list[float] = []

    def note(stepping: Any, args: Any, options: Any) -> None:
        assert stepping is optimizer
        seen.append(float(model.bias[0]))

    handles = [optimizer.register_step_pre_hook(note), optimizer.register_step_post_hook(note)]
    before = float(model.bias[0])
    optimizer.step()
    assert seen == [before, float(model.bias[0])]
    assert seen[0] != seen[1]
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert len(seen) == 2


def test_a_profiler_sees_the_step() -> None:
    _, optimizer = built()
    with profile() as profiler:
        assert optimizer.step().success
    assert "Optimizer.step#Optimizer.step" in [event.key for event in profiler.key_averages()]


def test_a_plan_of_fp32_dense_parameters_and_bf16_experts_can_be_printed() -> None:
    """A router in fp32 with experts in bf16: the dense unit has no bf16 parameter, the experts' no fp32 one."""
    model = nn.ModuleDict({"router": nn.Linear(4, 3, bias=False), "expert": nn.Linear(4, 5, bias=False).bfloat16()})
    model["expert"].weight.allreduce = False
    optimizer = get_optimizer(OptimizerConfig(lr=0.01, bf16=True), [model])
    # Adam's two fp32 moments for every element, and an fp32 copy of those in bf16.
    assert optimizer.plan.state_bytes() == 12 * 8 + 20 * (4 + 8)
    assert optimizer.plan.state_bytes() == sum(unit.state_bytes() for unit in optimizer.stepper.units)
    assert "adam/experts updates 1 parameters, 20 elements" in str(optimizer.plan)
    assert torch.float32 not in next(unit for unit in optimizer.plan.units if unit.is_expert).numbers
