"""Two optimizers of the same parameters: no update is lost in silence."""

import gc

import pytest
import torch
from stack_models import assert_equal, backward, make_model, train, weights
from torch import nn

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed.buffers.data_parallel import DistributedDataParallel
from opt_stack import Optimizer, get_optimizer

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
