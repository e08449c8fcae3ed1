"""Other optimizers of the same weights, and graphs from before a step."""

import gc

import pytest
import torch
from stack_models import FEATURES, assert_equal, make_model, over, train, weights
from torch import Tensor, nn

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.comm.threads import ThreadComm
from opt_kernels.optim import Lion
from opt_stack import DistributedDataParallel, Optimizer, get_optimizer

FP32_COPIES = OptimizerConfig(lr=1e-1, bf16=True, clip_grad=0.0)
REMAINDERS = OptimizerConfig(
    lr=1e-1, bf16=True, clip_grad=0.0, use_precision_aware_optimizer=True, use_distributed_optimizer=True
)
LOST = r"'\w.\w+' has other values than its main values, .* do not update a parameter by two optimizers"


def built(model: nn.Module, config: OptimizerConfig = FP32_COPIES) -> Optimizer:
    return get_optimizer(config, [model], {})


@pytest.mark.parametrize("case", ["both kept", "first gone", "first without copies", "wrapped"])
def test_an_optimizer_refuses_to_undo_the_update_of_another(case: str) -> None:
    """The second step computed from the main values of before the first, and wrote these weights."""
    model = make_model(torch.bfloat16)
    if case == "wrapped":
        model = DistributedDataParallel(DistributedDataParallelConfig(), model)
    first = built(model, REMAINDERS if case == "first without copies" else FP32_COPIES)
    second = built(model)
    train(model, first, range(1))
    if case == "first gone":
        del first
        gc.collect()
    before = weights(model)
    with pytest.raises(RuntimeError, match=LOST):
        train(model, second, range(1))
    assert_equal(weights(model), before)
    if case == "both kept":
        train(model, first, range(1, 2))


def test_an_optimizer_may_be_built_again() -> None:
    """As when a cell of a notebook runs again: the name still refers to the old one, which takes no more steps."""
    model = make_model(torch.bfloat16)
    alone = make_model(torch.bfloat16)
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
    first = built(model)
    second = built(model)
    train(model, first, range(1))
    second.reload_model_params()
    train(model, second, range(1))
    with pytest.raises(RuntimeError, match=LOST):
        train(model, first, range(1))


STALE = "modified by an inplace operation"


def loss(model: nn.Module) -> Tensor:
    x = torch.ones(4, FEATURES, dtype=next(model.parameters()).dtype)
    return model(x).float().square().mean()


STEPPED = {
    "fp32": OptimizerConfig(lr=1e-2),
    "sgd": OptimizerConfig(lr=1e-2, optimizer="sgd"),
    "bf16": FP32_COPIES,
    "remainders": REMAINDERS,
    "a drop-in": None,
}


@pytest.mark.parametrize("config", STEPPED.values(), ids=STEPPED)
def test_a_backward_pass_after_the_step_raises(config: OptimizerConfig | None) -> None:
    """In a GAN, the generator's loss went back through the new discriminator with the old activations."""
    model = make_model(torch.float32 if config is None else config.precision.params)
    optimizer = Lion(model.parameters(), lr=1e-2) if config is None else built(model, config)
    loss(model).backward()
    stale = loss(model)
    optimizer.step()
    with pytest.raises(RuntimeError, match=STALE):
        stale.backward()
    loss(model).backward()


@pytest.mark.parametrize("wrapped", [False, True])
def test_it_raises_on_ranks_that_own_no_shard_of_the_weights(wrapped: bool) -> None:
    def rank_main(comm: ThreadComm) -> None:
        config = DistributedDataParallelConfig(use_distributed_optimizer=True)
        chunk = DistributedDataParallel(config, make_model(), groups=over(comm)) if wrapped else make_model()
        config_of_step = OptimizerConfig(lr=1e-2, use_distributed_optimizer=True)
        optimizer = get_optimizer(config_of_step, [chunk], {}, pg_collection=over(comm))
        loss(chunk).backward()
        stale = loss(chunk)
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match=STALE):
            stale.backward()

    run_threads(3, rank_main)
