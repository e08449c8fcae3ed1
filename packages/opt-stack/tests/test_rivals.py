"""Other optimizers of the same weights, graphs from before a step, and copied models."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from stack_models import FEATURES, assert_equal, backward, make_model, train, weights
from torch import Tensor, nn

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.comm import Alone, Axes, Roles
from opt_distributed.comm.threads import ThreadComm
from opt_kernels.optim import AdamW, Lion
from opt_stack import DistributedDataParallel, Optimizer, get_optimizer

FP32_COPIES = OptimizerConfig(lr=1e-1, bf16=True, clip_grad=0.0)
REMAINDERS = OptimizerConfig(
    lr=1e-1, bf16=True, clip_grad=0.0, use_precision_aware_optimizer=True, use_distributed_optimizer=True
)
LOST = r"'\w.\w+' has other values than its main values, .* do not update a parameter by two optimizers"


def built(model: nn.Module, config: OptimizerConfig = FP32_COPIES) -> Optimizer:
    return get_optimizer(config, [model], {})


def test_an_optimizer_refuses_to_undo_the_update_of_another() -> None:
    """The second step computed from the main values of before the first, and wrote these weights."""
    model = make_model(torch.bfloat16)
    first, second = built(model), built(model)
    train(model, first, range(1))
    before = weights(model)
    backward(model, 1)
    with pytest.raises(RuntimeError, match=LOST):
        second.step()
    assert_equal(weights(model), before)
    train(model, first, range(1, 2))


def test_an_update_by_one_that_is_gone_is_not_lost_either() -> None:
    model = make_model(torch.bfloat16)
    first, second = built(model), built(model)
    train(model, first, range(1))
    del first
    gc.collect()
    with pytest.raises(RuntimeError, match=LOST):
        train(model, second, range(1))


def test_an_optimizer_without_copies_counts_its_updates_for_one_that_has_them() -> None:
    model = make_model(torch.bfloat16)
    copies, direct = built(model), built(model, REMAINDERS)
    train(model, direct, range(1))
    with pytest.raises(RuntimeError, match=LOST):
        train(model, copies, range(1))


def test_wrapped_chunks_are_no_exception() -> None:
    model = DistributedDataParallel(DistributedDataParallelConfig(), make_model(torch.bfloat16))
    first, second = built(model), built(model)
    train(model, first, range(1))
    with pytest.raises(RuntimeError, match=LOST):
        train(model, second, range(1))


def test_an_optimizer_may_be_built_again() -> None:
    """As when a cell of a notebook runs again: the name still refers to the old one, which takes no more steps."""
    model, alone = make_model(torch.bfloat16), make_model(torch.bfloat16)
    optimizer = built(model)
    train(model, optimizer, range(2))
    optimizer = built(model)
    train(model, optimizer, range(2, 4))
    expected = built(alone)
    train(alone, expected, range(2))
    del expected
    gc.collect()
    train(alone, built(alone), range(2, 4))
    assert_equal(weights(model), weights(alone))


def test_main_values_of_the_other_optimizer_may_be_read_again() -> None:
    model = make_model(torch.bfloat16)
    first, second = built(model), built(model)
    train(model, first, range(1))
    second.reload_model_params()
    train(model, second, range(1))
    with pytest.raises(RuntimeError, match=LOST):
        train(model, first, range(1))


STALE = "modified by an inplace operation"
Make = Callable[[nn.Module], torch.optim.Optimizer]


def loss(model: nn.Module) -> Tensor:
    x = torch.ones(4, FEATURES, dtype=next(model.parameters()).dtype)
    return model(x).float().square().mean()


def stack(**fields: Any) -> Make:
    return lambda model: get_optimizer(OptimizerConfig(lr=1e-2, **fields), [model], {})


MAKES: dict[str, tuple[Make, torch.dtype]] = {
    "AdamW": (lambda model: AdamW(model.parameters(), lr=1e-2), torch.float32),
    "Lion": (lambda model: Lion(model.parameters(), lr=1e-2), torch.float32),
    "stack": (stack(), torch.float32),
    "stack, sgd": (stack(optimizer="sgd"), torch.float32),
    "stack, bf16": (stack(bf16=True), torch.bfloat16),
    "stack, remainders": (stack(bf16=True, use_precision_aware_optimizer=True), torch.bfloat16),
}


@pytest.mark.parametrize(("make", "dtype"), MAKES.values(), ids=MAKES)
def test_a_backward_pass_after_the_step_raises(make: Make, dtype: torch.dtype) -> None:
    """In a GAN, the generator's loss went back through the new discriminator with the old activations."""
    model = make_model(dtype)
    optimizer = make(model)
    loss(model).backward()
    stale = loss(model)
    optimizer.step()
    with pytest.raises(RuntimeError, match=STALE):
        stale.backward()
    loss(model).backward()


@pytest.mark.parametrize("wrapped", [False, True])
def test_it_raises_on_ranks_that_own_no_shard_of_the_weights(wrapped: bool) -> None:
    def rank_main(comm: ThreadComm) -> None:
        axes = Axes(dp=comm, tp=Alone())
        roles = Roles(dense=axes, expert=axes, everyone=comm)
        model = make_model()
        config = DistributedDataParallelConfig(use_distributed_optimizer=True)
        chunk = DistributedDataParallel(config, model, groups=roles) if wrapped else model
        config_of_step = OptimizerConfig(lr=1e-2, use_distributed_optimizer=True)
        optimizer = get_optimizer(config_of_step, [chunk], {}, pg_collection=roles)
        loss(chunk).backward()
        stale = loss(chunk)
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match=STALE):
            stale.backward()

    run_threads(3, rank_main)


Pair = tuple[nn.Module, Optimizer]
REMAINDERS_MODELS = {"bf16": True, "use_precision_aware_optimizer": True, "store_param_remainders": True}
FORMS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "remainders": REMAINDERS_MODELS,
    "muon": {"optimizer": "muon", "bf16": True},
}


def built_models(form: str) -> Pair:
    config = OptimizerConfig(lr=1e-1, clip_grad=1.0, **FORMS[form])
    model = make_model(config.precision.params)
    return model, get_optimizer(config, [model])


def copied(form: str, pair: Pair) -> Pair:
    """A copy of the model, with another optimizer that has loaded the state of the first."""
    model = copy.deepcopy(pair[0])
    optimizer = get_optimizer(OptimizerConfig(lr=1e-1, clip_grad=1.0, **FORMS[form]), [model])
    optimizer.load_state_dict(pair[1].state_dict())
    return model, optimizer


def step(pair: Pair, number: int) -> None:
    model, optimizer = pair
    optimizer.zero_grad()
    backward(model, number)
    optimizer.step()


def trained(form: str, *numbers: int) -> Pair:
    pair = built_models(form)
    for number in numbers:
        step(pair, number)
    return pair


def assert_same(one: Pair, other: Pair) -> None:
    assert_equal(weights(one[0]), weights(other[0]))
    assert_equal(one[1].state_dict()["state"], other[1].state_dict()["state"])


@pytest.mark.parametrize("form", FORMS)
def test_a_copied_model_and_its_original_continue_as_if_each_were_alone(form: str) -> None:
    original = trained(form, 0, 1, 2)
    for refused in (original, original[1]):
        with pytest.raises(TypeError, match="load this one's state_dict"):
            copy.deepcopy(refused)
    other = copied(form, original)
    for number in (3, 4, 5):
        step(original, number)
        step(other, 10 + number)
    assert_same(original, trained(form, 0, 1, 2, 3, 4, 5))
    assert_same(other, trained(form, 0, 1, 2, 13, 14, 15))
    assert not torch.equal(*(next(pair[0].parameters()) for pair in (original, other)))
