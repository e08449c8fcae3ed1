"""Any torch.optim class as a rule: its own numbers, its state saved like ours, and clear refusals."""

import copy
import re
from typing import Any

import pytest
import torch
from stack_models import assert_equal, backward, make_model, train, weights
from torch import nn

from opt_config import ConfigError, OptimizerConfig
from opt_kernels.works import Hyper, Work
from opt_stack import Registry, get_optimizer, torch_rule


class WarmsUp(torch.optim.Optimizer):
    """Its step count is in its group, and decides the size of a step; the second step adds state."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                step = param.grad
                if group["step"] > 1:
                    step = self.state[param].setdefault("buffer", torch.zeros_like(param)).add_(param.grad)
                param.sub_(step, alpha=group["lr"] * (1 - 0.5 ** group["step"]))


CLASSES = [
    pytest.param(torch.optim.AdamW, {"betas": (0.8, 0.95)}, id="AdamW"),
    pytest.param(torch.optim.Adam, {"amsgrad": True, "eps": 1e-6}, id="Adam-amsgrad"),
    pytest.param(torch.optim.NAdam, {}, id="NAdam"),  # keeps a number of its own
    pytest.param(torch.optim.ASGD, {}, id="ASGD"),  # its first state is not zero
    pytest.param(torch.optim.Adagrad, {"initial_accumulator_value": 0.1}, id="Adagrad"),  # makes state when built
    pytest.param(torch.optim.RMSprop, {"momentum": 0.9, "centered": True}, id="RMSprop"),
    pytest.param(torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1}, id="SGD"),  # its first step differs
    pytest.param(torch.optim.Adadelta, {}, id="Adadelta"),
    pytest.param(WarmsUp, {}, id="a step count in the group"),
]


def config(**changes: Any) -> OptimizerConfig:
    return OptimizerConfig(**{"optimizer": "theirs", "lr": 1e-2, "weight_decay": 0.1, "clip_grad": 0.0, **changes})


def registry(cls: type[torch.optim.Optimizer], **options: Any) -> Registry:
    return Registry().with_rule(torch_rule("theirs", cls, **options))


@pytest.mark.parametrize(("cls", "options"), CLASSES)
def test_torch_rules_train_bit_for_bit_also_after_a_load(cls: Any, options: dict[str, Any]) -> None:
    rules = registry(cls, **options)
    ours = make_model()
    theirs = make_model()
    first = get_optimizer(config(), [ours], {}, rules=rules)
    train(ours, first, range(3))
    resumed = get_optimizer(config(), [ours], {}, rules=rules)
    resumed.load_state_dict(copy.deepcopy(first.state_dict()))
    train(ours, resumed, range(3, 6))
    train(theirs, cls(theirs.parameters(), lr=1e-2, weight_decay=0.1, **options), range(6))
    assert_equal(weights(ours), weights(theirs))


def test_16_bit_parameters_get_fp32_mains() -> None:
    model = make_model(torch.bfloat16)
    mains = make_model(torch.bfloat16).float()
    optimizer = get_optimizer(config(bf16=True), [model], {}, rules=registry(torch.optim.Adamax))
    theirs = torch.optim.Adamax(mains.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(4):
        model.zero_grad()
        backward(model, step)
        for main, param in zip(mains.parameters(), model.parameters(), strict=True):
            main.grad = param.grad.float()
        optimizer.step()
        theirs.step()
        assert_equal(weights(model), {name: w.bfloat16() for name, w in weights(mains).items()})


def test_a_groups_numbers_reach_the_class_at_every_step() -> None:
    ours = make_model()
    theirs = make_model()
    optimizer = get_optimizer(config(), [ours], {}, rules=registry(torch.optim.Adamax))
    other = torch.optim.Adamax(theirs.parameters(), lr=1e-2, weight_decay=0.1)
    for step, edit in enumerate([{}, {"lr": 1e-3}, {"betas": (0.5, 0.9)}, {"eps": 1e-4}, {"weight_decay": 0.0}]):
        optimizer.param_groups[0].update(edit)
        other.param_groups[0].update(edit)
        train(ours, optimizer, range(step, step + 1))
        train(theirs, other, range(step, step + 1))
    assert_equal(weights(ours), weights(theirs))


@pytest.mark.parametrize("skip", [True, False])
def test_torch_rules_scale_grads_and_skipped_steps_keep_weights(skip: bool) -> None:
    """There the flag goes to the rule; on a CPU the rule is not called. Gradients are read only."""
    main = torch.ones(3)
    work = Work(grad=torch.ones(3), main=main, state={})
    rule = torch_rule("theirs", torch.optim.SGD).make(config())
    rule.update_([(Hyper(lr=0.5, momentum=0.0), [work])], grad_scale=0.5, skip=torch.tensor(skip))
    assert main.tolist() == [1.0 if skip else 0.75] * 3
    assert work.grad.tolist() == [1.0] * 3


# --- refusals ---------------------------------------------------------------------------------------------------------


class CountsInItsGroup(torch.optim.SGD):
    """Keeps a count that its steps depend on in its group, not in the state of a parameter."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1
        return super().step(closure)


class CountsInAnAttribute(torch.optim.SGD):
    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        return super().step(closure)


class KeepsMoreForMatrices(torch.optim.Adam):
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for param, state in self.state.items():
            state |= {"copy": param.detach().clone()} if param.dim() > 1 else {}
        return loss


Adafactor = torch.optim.Adafactor
SGD = torch.optim.SGD
NAdam = torch.optim.NAdam
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (KeepsMoreForMatrices, {}, "KeepsMoreForMatrices keeps different state for vectors and matrices"),
    (torch.optim.LBFGS, {}, "LBFGS({}) cannot be stepped: "),
    (torch.optim.SparseAdam, {}, "SparseAdam({}) cannot be stepped: "),
    (Adafactor, {}, "Adafactor keeps 'row_var' as a tensor of shape (3, 1) for a parameter of shape (3, 4)"),
    (CountsInItsGroup, {}, "CountsInItsGroup keeps param_groups[0]['k'] outside of optimizer.state"),
    (CountsInAnAttribute, {}, "CountsInAnAttribute keeps calls outside of optimizer.state"),
    (SGD, {"lr": 0.1}, "lr=0.1 cannot be fixed here; set it in OptimizerConfig"),
    (SGD, {"momentum": -1.0}, "cannot be stepped: Invalid momentum value: -1.0"),
    (SGD, {"momentun": 0.9}, "unexpected keyword argument 'momentun'"),
]
NARROW = {"use_precision_aware_optimizer": True, "exp_avg_dtype": torch.bfloat16}
UNSERVED: list[tuple[Any, dict[str, Any], str]] = [
    (NAdam, {"use_distributed_optimizer": True}, "use_distributed_optimizer=True: optimizer='theirs' wraps torch's"),
    (NAdam, {"use_layer_wise_distributed_optimizer": True}, "layer_wise_distributed_optimizer=True: optimizer='theirs"),
    (torch.optim.Rprop, {}, "weight_decay=0.1: optimizer='theirs' is Rprop, which has none; set 0.0"),
    (NAdam, NARROW, "exp_avg_dtype=torch.bfloat16: optimizer='theirs' keeps it in fp32; leave it at"),
]


def test_unfit_classes_are_refused_at_once_configs_when_built() -> None:
    for cls, options, message in REFUSED:
        with pytest.raises(ConfigError, match=rf"torch_rule\('theirs'\): .*{re.escape(message)}"):
            torch_rule("theirs", cls, **options)
    for cls, changes, message in UNSERVED:
        with pytest.raises(ConfigError, match=re.escape(message)):
            get_optimizer(config(**changes), [make_model()], rules=registry(cls))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_a_parameter_that_the_class_refuses_is_named() -> None:
    rules = registry(torch.optim.Muon)
    with pytest.raises(ConfigError, match=r"optimizer='theirs' refuses a parameter of shape \(3,\): "):
        get_optimizer(config(), [make_model()], rules=rules)
    get_optimizer(config(), [nn.Linear(3, 4, bias=False)], rules=rules)


def test_state_that_appears_later_is_not_lost_silently() -> None:
    model = make_model()
    optimizer = get_optimizer(config(), [model], rules=registry(torch.optim.SGD))
    optimizer.param_groups[0]["momentum"] = 0.9
    backward(model, 0)
    with pytest.raises(
        ConfigError, match=r"keeps momentum_buffer with a group's current hyper-parameters, but not with those"
    ):
        optimizer.step()
