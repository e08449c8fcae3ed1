"""Weights that the model's `load_state_dict` set after the optimizer was built are not lost in silence."""

import copy
import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from stack_models import assert_equal, backward, make_model, stepped, train, weights
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed.comm.collectives import Alone
from opt_distributed.comm.groups import Axes, Roles
from opt_distributed.comm.threads import ThreadComm, run_threads
from opt_stack import DistributedDataParallel, get_optimizer, release_gradients

BF16 = OptimizerConfig(lr=1e-2, bf16=True, clip_grad=0.0)
COPIES = {
    "fp32 copies": BF16,
    "scaled fp16": replace(BF16, use_precision_aware_optimizer=True, main_params_dtype=torch.float16),
}
copies = pytest.mark.parametrize("config", COPIES.values(), ids=COPIES)
LOST = r"weights were loaded into the model: '\w.\w+' has other values than its main values"


def given(dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    return {name: torch.full_like(param, 0.5) for name, param in make_model(dtype).state_dict().items()}


@copies
def test_a_step_that_would_restore_the_old_weights_is_refused(config: OptimizerConfig) -> None:
    """The first update after `model.load_state_dict` wrote the weights of before the load."""
    model, optimizer = stepped(config)
    model.load_state_dict(given())
    backward(model, 2)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=LOST):
            optimizer.step()
    assert_equal(weights(model), given())
    optimizer.reload_model_params()
    assert optimizer.step().success
    assert (model[0].weight - 0.5).abs().max() < 0.1


@copies
def test_the_load_of_a_part_is_noticed(config: OptimizerConfig) -> None:
    model, optimizer = stepped(config)
    backward(model, 2)
    model[2].load_state_dict({"weight": torch.zeros(3, 7), "bias": model[2].bias})
    with pytest.raises(RuntimeError, match=r"weights were loaded into the model: '2.weight'"):
        optimizer.step()


@copies
@pytest.mark.parametrize("model_first", [True, False])
def test_weights_of_the_same_checkpoint_are_loaded_before_or_after_the_state(
    config: OptimizerConfig, model_first: bool
) -> None:
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


@copies
def test_weights_may_be_exchanged_for_an_evaluation(config: OptimizerConfig) -> None:
    model, optimizer = stepped(config)
    kept = copy.deepcopy(model.state_dict())
    model.load_state_dict(given())
    model.load_state_dict(kept)
    train(model, optimizer, range(2, 3))


@pytest.mark.parametrize(
    "config", [OptimizerConfig(lr=1e-2), replace(BF16, use_precision_aware_optimizer=True)], ids=["fp32", "remainders"]
)
def test_main_values_that_are_the_parameter_follow_a_load(config: OptimizerConfig) -> None:
    model = make_model(config.precision.params)
    optimizer = get_optimizer(config, [model], {})
    model.load_state_dict(given(config.precision.params))
    train(model, optimizer, range(1))
    assert (model[0].weight - 0.5).abs().max() < 0.1


def assign(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())


REPLACED = {
    "assigned": assign,
    "parametrized": lambda model: parametrizations.weight_norm(model[0]),
    "loaded": lambda model: model.load_state_dict(given(torch.float32), assign=True),
}


@pytest.mark.parametrize("replace_", REPLACED.values(), ids=REPLACED)
@pytest.mark.parametrize("wrapped", [False, True])
def test_parameters_that_the_model_no_longer_has_are_refused(replace_: Callable[[Any], object], wrapped: bool) -> None:
    """The optimizer went on to update them, and the model's own were never trained."""
    model = make_model()
    chunk = DistributedDataParallel(DistributedDataParallelConfig(), model) if wrapped else model
    optimizer = get_optimizer(OptimizerConfig(lr=1e-2), [chunk], {})
    replace_(model)
    backward(model, 0)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"was replaced in the model after the optimizer was built"):
            optimizer.step()


def test_parameters_that_a_later_load_replaced_are_refused() -> None:
    model, optimizer = stepped(BF16)
    model.load_state_dict(given(), assign=True)
    with pytest.raises(RuntimeError, match=r"'0.weight' was replaced in the model"):
        optimizer.step()


@pytest.mark.parametrize("loads_on", [(0, 1, 2), (1,)], ids=["all ranks", "one rank"])
def test_every_rank_refuses(loads_on: tuple[int, ...]) -> None:
    def rank_main(comm: ThreadComm) -> None:
        axes = Axes(dp=comm, tp=Alone())
        roles = Roles(dense=axes, expert=axes, everyone=comm)
        shared: dict[str, Any] = {"use_distributed_optimizer": True, "overlap_param_gather": True}
        of_wrapper = DistributedDataParallelConfig(overlap_grad_reduce=True, **shared)
        chunk = DistributedDataParallel(of_wrapper, make_model(torch.bfloat16), groups=roles)
        optimizer = get_optimizer(replace(BF16, **shared), [chunk], {})
        train(chunk, optimizer, range(2))
        if comm.rank in loads_on:
            chunk.load_state_dict(given())
        optimizer.zero_grad()
        backward(chunk, 2)
        with pytest.raises(RuntimeError, match=r"weights were loaded into the model|other rank.s. refused"):
            optimizer.step()

    run_threads(3, rank_main)


def test_an_update_in_backward_is_refused() -> None:
    model = make_model(torch.bfloat16)
    optimizer = get_optimizer(BF16, [model], {})
    release_gradients(optimizer)
    model.load_state_dict(given())
    with pytest.raises(RuntimeError, match="weights were loaded into the model"):
        backward(model, 0)
    assert_equal(weights(model), given())


def test_copies_and_pickles_of_a_trained_model_are_not_watched() -> None:
    model, optimizer = stepped(BF16)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        other.load_state_dict(given())
    train(model, optimizer, range(2, 3))
