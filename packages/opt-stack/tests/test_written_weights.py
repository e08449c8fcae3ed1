"""Weights that other code sets in the model, by a load or in place, after the optimizer was built are never lost."""

import copy
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from stack_models import assert_equal, backward, make_model, stepped, train, weights
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import opt_checkpoint
from opt_checkpoint import CheckpointValueError
from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_stack import DistributedDataParallel, Optimizer, Registry, get_optimizer, release_gradients
from opt_stack.state import weights as state_weights

BF16 = OptimizerConfig(lr=1e-2, bf16=True, clip_grad=0.0)
SCALED = replace(BF16, use_precision_aware_optimizer=True, main_params_dtype=torch.float16)
AVERAGED = OptimizerConfig(lr=1e-2, optimizer="schedule_free", clip_grad=0.0, weight_decay=0.0)
KEPT = "keeps weights of its own in its state"
LOST = r"weights were loaded into the model: '\w.\w+' has other values than its main values"
Write = Callable[[nn.Module, Path], object]


@torch.no_grad()
def halves(model: nn.Module, path: Path) -> None:
    for param in model.parameters():
        param.fill_(0.5)


def saved_halves() -> nn.Module:
    model = make_model(torch.bfloat16)
    halves(model, Path())
    return model


def load(model: nn.Module, path: Path) -> None:
    opt_checkpoint.save({"model": opt_checkpoint.sharded_model(saved_halves())}, path)
    opt_checkpoint.load({"model": opt_checkpoint.sharded_model(model)}, path)


def assign_data(model: nn.Module, path: Path) -> None:
    for param in model.parameters():
        param.data = torch.full_like(param, 0.5)


def given(dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    return {name: torch.full_like(param, 0.5) for name, param in make_model(dtype).state_dict().items()}


WRITES: dict[str, Write] = {
    "load_state_dict": lambda model, path: model.load_state_dict(given()),
    "of a part": lambda model, path: model[2].load_state_dict({"weight": torch.zeros(3, 7), "bias": model[2].bias}),
    "in place": halves,
    "opt_checkpoint.load": load,
    "param.data": assign_data,
}


@pytest.mark.parametrize("config", [BF16, SCALED], ids=["fp32 copies", "scaled fp16"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_step_that_would_restore_the_old_weights_is_refused(
    write: Write, config: OptimizerConfig, tmp_path: Path
) -> None:
    """The next update wrote the weights of before the load."""
    model, optimizer = stepped(config)
    write(model, tmp_path / "weights")
    expected = weights(model)
    backward(model, 2)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=LOST):
            optimizer.step()
    with pytest.raises(RuntimeError, match=LOST):
        optimizer.prepare_grads()
    assert_equal(weights(model), expected)
    optimizer.reload_model_params()
    assert optimizer.step().success
    assert (model[0].weight - expected["0.weight"]).abs().max() < 0.1


@pytest.mark.parametrize("config", [BF16, SCALED], ids=["fp32 copies", "scaled fp16"])
def test_a_save_that_a_resume_would_make_old_is_refused(config: OptimizerConfig, tmp_path: Path) -> None:
    """A resume read the main values of before the load, and wrote them to the parameters without a word."""
    model, optimizer = stepped(config)
    halves(model, tmp_path)
    expected = weights(model)
    local = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    resumed_model, resumed = stepped(config)
    resumed_model.load_state_dict(local[0])
    resumed.load_state_dict(local[1])
    assert_equal(weights(resumed_model), expected)
    described = {"model": opt_checkpoint.sharded_model(model)}
    described["optimizer"] = optimizer.sharded_state_dict(described["model"])
    with pytest.raises(CheckpointValueError, match=LOST):
        opt_checkpoint.save(described, tmp_path / "refused")
    optimizer.reload_model_params()
    described["optimizer"] = optimizer.sharded_state_dict(described["model"])
    opt_checkpoint.save(described, tmp_path / "saved")
    halves(model, tmp_path)
    opt_checkpoint.load(described, tmp_path / "saved")  # which replaces all of it


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize(
    "config", [BF16, SCALED, replace(AVERAGED, bf16=True)], ids=["fp32 copies", "scaled fp16", "averaged"]
)
@pytest.mark.parametrize("model_first", [True, False])
def test_weights_may_be_loaded_before_or_after_the_state(config: OptimizerConfig, model_first: bool) -> None:
    model, optimizer = stepped(config)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, range(2, 4))
    expected = weights(model)
    if model_first:
        model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    if not model_first:
        model.load_state_dict(saved[0])
    train(model, optimizer, range(2, 4))
    assert_equal(weights(model), expected)


def test_writes_that_keep_or_restore_the_values_are_harmless() -> None:
    model, optimizer = stepped(BF16)
    model[2].weight.data = model[2].weight.detach().clone()
    with torch.no_grad():
        model[0].weight.mul_(2).mul_(0.5)
    train(model, optimizer, range(2, 4))
    kept = copy.deepcopy(model.state_dict())
    model.load_state_dict(given())  # for an evaluation
    model.load_state_dict(kept)
    train(model, optimizer, range(4, 5))


@pytest.mark.parametrize(
    "config", [OptimizerConfig(lr=1e-2), replace(BF16, use_precision_aware_optimizer=True)], ids=["fp32", "remainders"]
)
def test_main_values_that_are_the_parameter_follow_a_load(config: OptimizerConfig) -> None:
    model = make_model(config.precision.params)
    optimizer = get_optimizer(config, [model], {})
    model.load_state_dict(given(config.precision.params))
    train(model, optimizer, range(1))
    assert (model[0].weight - 0.5).abs().max() < 0.1


REPLACED: dict[str, Callable[[Any], object]] = {
    "assigned": lambda model: setattr(model[0], "weight", nn.Parameter(model[0].weight.detach().clone())),
    "parametrized": lambda model: parametrizations.weight_norm(model[0]),
    "loaded": lambda model: model.load_state_dict(given(torch.float32), assign=True),
}


@pytest.mark.parametrize("replace_", REPLACED.values(), ids=REPLACED)
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("steps", [0, 2])
def test_parameters_that_the_model_no_longer_has_are_refused(
    replace_: Callable[[Any], object], wrapped: bool, steps: int
) -> None:
    """The optimizer went on to update them, and the model's own were never trained."""
    model = make_model()
    chunk = DistributedDataParallel(DistributedDataParallelConfig(), model) if wrapped else model
    optimizer = get_optimizer(OptimizerConfig(lr=1e-2), [chunk], {})
    train(model, optimizer, range(steps))
    optimizer.zero_grad()
    replace_(model)
    backward(model, 0)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"was replaced in the model after the optimizer was built"):
            optimizer.step()


MOVED: dict[str, Callable[[Any], object]] = {
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5),
    "a parametrization": lambda layer: parametrize.register_parametrization(layer, "weight", nn.Identity()),
}


@pytest.mark.parametrize("move", MOVED.values(), ids=MOVED)
@pytest.mark.parametrize("steps", [0, 2])
def test_parameters_kept_under_another_name_are_trained(move: Callable[[Any], object], steps: int) -> None:
    model = make_model()
    optimizer = get_optimizer(OptimizerConfig(lr=1e-2), [model], {})
    train(model, optimizer, range(steps))
    kept = model[0].weight
    move(model[0])
    before = kept.detach().clone()
    train(model, optimizer, range(steps, steps + 2))
    assert not torch.equal(kept, before)


def test_copies_and_pickles_of_a_trained_model_are_not_watched() -> None:
    model, optimizer = stepped(BF16)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        other.load_state_dict(given())
    train(model, optimizer, range(2, 3))


@pytest.mark.parametrize("releases", [False, True])
@pytest.mark.parametrize("rule", ["adam", "schedule_free"])
@pytest.mark.filterwarnings("error:weights were loaded")
def test_values_are_compared_after_a_write_of_others_only(
    monkeypatch: pytest.MonkeyPatch, releases: bool, rule: str
) -> None:
    """The optimizer's own writes are not followed by a pass over all weights."""
    compared = []
    differs = state_weights.has_foreign_write
    monkeypatch.setattr(state_weights, "has_foreign_write", lambda main: (compared.append(main), differs(main))[1])
    model = make_model(torch.bfloat16)
    optimizer = get_optimizer(replace(BF16, optimizer=rule, weight_decay=0.0), [model], {})
    if releases:
        release_gradients(optimizer)
    train(model, optimizer, range(5))
    assert not compared
    halves(model, Path())
    with pytest.raises(RuntimeError, match=LOST):
        train(model, optimizer, range(5, 6))
    assert compared
    assert_equal(weights(model), weights(saved_halves()))
    assert releases or "5 applied, 1 skipped or refused" in str(optimizer.report())


def test_a_model_made_in_inference_mode_is_trained() -> None:
    """Its tensors have no version."""
    with torch.inference_mode():
        model = make_model(torch.bfloat16)
    optimizer = get_optimizer(replace(BF16, weight_decay=0.0), [model], {})
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    before = weights(model)
    optimizer.step()
    assert all(not torch.equal(param, before[name]) for name, param in model.named_parameters())


def averaged(config: OptimizerConfig = AVERAGED) -> tuple[nn.Module, Optimizer]:
    model = make_model(config.precision.params)
    optimizer = get_optimizer(config, [model], {})
    train(model, optimizer, range(5))
    return model, optimizer


@pytest.mark.parametrize("config", [AVERAGED, replace(AVERAGED, bf16=True)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("given", [False, True], ids=["parameters", "state dict"])
def test_a_rule_that_keeps_weights_starts_anew_from_loaded_ones(config: OptimizerConfig, given: bool) -> None:
    """schedule_free's z was left behind, so that the next steps went back to the weights of before the load."""
    model, optimizer = averaged(config)
    halves(model, Path())
    optimizer.reload_model_params(weights(model) if given else None)
    other = make_model(config.precision.params)
    halves(other, Path())
    fresh = get_optimizer(config, [other], {})
    train(model, optimizer, range(5, 8))
    train(other, fresh, range(5, 8))
    assert_equal(weights(model), weights(other))
    assert_equal(optimizer.state_dict()["state"], fresh.state_dict()["state"])


def test_writes_to_weights_that_the_rule_keeps_are_warned_about() -> None:
    model, optimizer = averaged()
    model.load_state_dict(make_model().state_dict())
    with pytest.warns(UserWarning, match=KEPT):
        train(model, optimizer, range(1))
    with torch.no_grad():
        model[0].weight.zero_()
    with pytest.warns(UserWarning, match=KEPT):
        train(model, optimizer, range(1))
    optimizer.eval()
    model.load_state_dict(make_model().state_dict())
    with pytest.warns(UserWarning, match=r"train\(\) replaces them by the trained weights") as caught:
        optimizer.train()
    assert caught[0].filename == __file__


def test_a_load_after_an_abandoned_iteration_warns() -> None:
    model = make_model()
    optimizer = get_optimizer(AVERAGED, [model], {})
    release_gradients(optimizer)
    backward(model, 0)
    optimizer.zero_grad()
    halves(model, Path())
    with pytest.warns(UserWarning, match=KEPT):
        backward(model, 1)


def test_a_rule_under_another_name_evaluates_and_trains_on() -> None:
    """`train()` left the weights for evaluation: the trained ones were lost."""
    rules = Registry().with_rule(replace(Registry().entries["schedule_free"], name="alias"))
    model = make_model()
    optimizer = get_optimizer(replace(AVERAGED, optimizer="alias"), [model], {}, rules=rules)
    train(model, optimizer, range(5))
    trained = weights(model)
    want, of_want = averaged()
    optimizer.eval()
    of_want.eval()
    assert_equal(weights(model), weights(want))
    optimizer.train()
    assert_equal(weights(model), trained)


@pytest.mark.filterwarnings("error::UserWarning")
def test_an_evaluation_is_not_warned_about() -> None:
    model, optimizer = averaged()
    for _ in range(2):
        optimizer.eval()
        optimizer.eval()
        optimizer.state_dict()
        optimizer.train()
        optimizer.train()
        train(model, optimizer, range(2))
