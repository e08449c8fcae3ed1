"""`DeferredOptimizer`: parameters are replaced after it is made, as Accelerate's FSDP2 does; then it is the façade."""

import copy
from typing import Any

import pytest
import torch
from stack_models import assert_equal, make_model, train, weights
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from opt_config import ConfigError, DistributedDataParallelConfig, OptimizerConfig
from opt_kernels.hooks import CautiousDecay
from opt_stack import DistributedDataParallel, ParamKey, get_optimizer
from opt_stack.adapters import DeferredOptimizer


def replace_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """New parameters in the model and the groups, with Accelerate's placeholders in between."""
    numbers = {id(param): name for name, param in model.named_parameters()}
    names = [[numbers[id(param)] for param in group["params"]] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        for i, param in enumerate(group["params"]):
            group["params"][i] = torch.empty(1, dtype=param.dtype)
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(param.detach().clone()))
    new = dict(model.named_parameters())
    for group, of_group in zip(optimizer.param_groups, names, strict=True):
        group["params"] = [new[name] for name in of_group]


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range = range(3)) -> dict[str, Tensor]:
    train(model, optimizer, steps)
    return weights(model)


def config(**fields: object) -> OptimizerConfig:
    return OptimizerConfig(**{"optimizer": "muon", "lr": 1e-2, **fields})  # type: ignore[arg-type]


def deferred(*, is_replaced: bool, **fields: object) -> tuple[nn.Module, DeferredOptimizer]:
    model = make_model()
    optimizer = DeferredOptimizer(config(**fields), model)
    if is_replaced:
        replace_parameters(model, optimizer)
    return model, optimizer


@pytest.mark.parametrize("is_replaced", [True, False], ids=["replaced", "kept"])
@pytest.mark.parametrize("rule", ["adam", "muon", "schedule_free"])
def test_it_trains_as_the_optimizer_of_the_final_parameters(rule: str, is_replaced: bool) -> None:
    expected = make_model()
    want = trained(expected, get_optimizer(config(optimizer=rule), [expected]))
    model = make_model()
    optimizer = DeferredOptimizer(config(optimizer=rule), model)
    optimizer.load_state_dict(optimizer.state_dict())  # what Accelerate does at once
    if is_replaced:
        replace_parameters(model, optimizer)
    assert optimizer._built is None
    assert_equal(trained(model, optimizer), want)
    optimizer.eval()
    shown = weights(model)
    optimizer.train()
    assert_equal(weights(model), want)
    assert torch.equal(shown["0.weight"], want["0.weight"]) == (rule != "schedule_free")


def test_attributes_of_replaced_params_still_choose_their_rule() -> None:
    model = make_model()
    model[2].weight.is_embedding_or_output_parameter = True
    model[0].weight.is_qkv = False
    optimizer = DeferredOptimizer(config(), model)
    replace_parameters(model, optimizer)
    assert not hasattr(model[2].weight, "is_embedding_or_output_parameter")
    model[0] = nn.Sequential(model[0])  # as regional compilation and activation checkpointing do
    train(model, optimizer, range(3))
    assert "momentum_buffer" not in optimizer.state[model[2].weight]
    assert "momentum_buffer" in optimizer.state[model[0][0].weight]
    assert model[2].weight.is_embedding_or_output_parameter
    assert model[0][0].weight.is_qkv is False


def test_a_schedule_made_of_it_goes_on_when_it_is_built() -> None:
    model = make_model()
    optimizer = DeferredOptimizer(config(), model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    replace_parameters(model, optimizer)
    for step in range(3):
        assert {group["lr"] for group in optimizer.param_groups} == {1e-2 * 0.5**step}
        train(model, optimizer, range(step, step + 1))
        schedule.step()
    assert {group["lr"] for group in optimizer.built.param_groups} == {1e-2 * 0.5**3}


@pytest.mark.parametrize("is_replaced", [True, False], ids=["replaced", "kept"])
@pytest.mark.parametrize("is_stepped", [True, False], ids=["stepped", "new"])
def test_a_save_before_the_first_step_holds_the_initial_state(is_stepped: bool, is_replaced: bool) -> None:
    saved_model = make_model()
    saved = copy.deepcopy(DeferredOptimizer(config(lr=2e-2), saved_model).state_dict())
    want = trained(saved_model, get_optimizer(config(lr=2e-2), [saved_model]))
    model, optimizer = deferred(is_replaced=is_replaced)
    if is_stepped:
        train(model, optimizer, range(3))
    model.load_state_dict(make_model().state_dict())
    optimizer.load_state_dict(saved)
    assert_equal(trained(model, optimizer), want)


@pytest.mark.parametrize("is_replaced", [True, False], ids=["replaced", "kept"])
def test_reading_an_attribute_never_builds_nor_waits_for_ranks(is_replaced: bool) -> None:
    model, optimizer = deferred(is_replaced=is_replaced)
    optimizer.train()
    assert list(optimizer.state) == []
    assert model[0].weight not in optimizer.state
    for read in (
        lambda: optimizer.built,
        lambda: optimizer.state[model[0].weight],
        lambda: optimizer.state.__setitem__(model[0].weight, {}),
        lambda: setattr(optimizer, "state", {}),
    ):
        with pytest.raises(RuntimeError, match=r"is not built.*build\(\) after prepare"):
            read()
    assert optimizer._built is None
    assert optimizer.build() is optimizer.build() is optimizer.built
    assert "momentum_buffer" in optimizer.state[model[0].weight]


@pytest.mark.parametrize("steps_before_save", [0, 2])
@pytest.mark.parametrize("is_replaced", [True, False], ids=["replaced", "kept"])
def test_torchs_checkpoints_save_and_fill_an_unbuilt_optimizer(is_replaced: bool, steps_before_save: int) -> None:
    unbroken = make_model()
    want = trained(unbroken, get_optimizer(config(), [unbroken]), range(4))
    first, saving = deferred(is_replaced=is_replaced)
    train(first, saving, range(steps_before_save))
    saved = copy.deepcopy(get_optimizer_state_dict(first, saving))
    resumed, loading = deferred(is_replaced=is_replaced)
    resumed.load_state_dict(first.state_dict())
    to_fill = get_optimizer_state_dict(resumed, loading)
    assert to_fill["state"].keys() == saved["state"].keys() == dict(resumed.named_parameters()).keys()
    assert {float(of_param["step"]) for of_param in saved["state"].values()} == {float(steps_before_save)}
    set_optimizer_state_dict(resumed, loading, saved)
    assert_equal(trained(resumed, loading, range(steps_before_save, 4)), want)


def test_hooks_are_recorded_and_state_dict_hooks_are_called() -> None:
    model = make_model()
    optimizer = DeferredOptimizer(config(weight_decay=0.1), model, hooks=[CautiousDecay()])
    called = []
    optimizer.register_state_dict_post_hook(lambda *_: called.append("saved"))
    optimizer.register_step_post_hook(lambda *_: called.append("stepped"))
    train(model, optimizer, range(1))
    optimizer.state_dict()
    assert called == ["stepped", "saved"]
    assert optimizer.param_groups[0]["hooks"]


def test_a_method_replaced_by_a_trainer_survives_the_build() -> None:
    model = make_model()
    saved = []
    optimizer = DeferredOptimizer(config(), model)
    state_dict = optimizer.state_dict
    optimizer.state_dict = lambda: saved.append("saved") or state_dict()  # type: ignore[func-returns-value, method-assign]
    train(model, optimizer, range(1))
    assert optimizer.state_dict()["state"]
    assert saved == ["saved"]


def test_what_cannot_work_is_refused_when_it_is_made() -> None:
    model = make_model()
    wrapped = DistributedDataParallel(DistributedDataParallelConfig(), make_model())
    refused: list[tuple[tuple[Any, ...], str]] = [
        ((config(optimizer="muonn"), model), "muonn"),
        ((config(), model, {ParamKey(name="headd.*"): {"lr_mult": 2.0}}), "headd"),
        ((config(), [model]), "pass the module itself"),
        ((config(), wrapped), "use get_optimizer"),
    ]
    for arguments, message in refused:
        with pytest.raises(ConfigError, match=message):
            DeferredOptimizer(*arguments)


def test_late_replacements_copies_and_new_groups_are_refused() -> None:
    model = make_model()
    optimizer = DeferredOptimizer(config(), model)
    params = optimizer.param_groups[0]["params"]
    first = params[0]
    params[0] = torch.empty(1)
    with pytest.raises(ConfigError, match="not a trainable parameter"):
        optimizer.step()
    params[0] = first
    train(model, optimizer, range(1))
    with pytest.raises(TypeError, match="copied or pickled"):
        copy.deepcopy(optimizer)
    with pytest.raises(ValueError, match="make a new one"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    replace_parameters(model, optimizer)
    with pytest.raises(ValueError, match="other parameters than those"):
        train(model, optimizer, range(1, 2))
