"""Parameters that share memory without being one `nn.Parameter` are refused, in whatever layout."""

from typing import Any

import pytest
import torch
from stack_models import backward, train
from torch import nn

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed.comm.collectives import Alone
from opt_distributed.comm.groups import Axes, Roles
from opt_distributed.comm.threads import ThreadComm, run_threads
from opt_stack import DistributedDataParallel, get_optimizer

BF16 = OptimizerConfig(lr=1e-2, bf16=True)
SHARED = r"share memory; tie parameters by using one nn.Parameter twice"


def tied(*, frozen: bool = False, dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    """Two layers whose weights are two parameters over the same memory."""
    torch.manual_seed(0)
    first, second = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
    second.weight = nn.Parameter(first.weight.data, requires_grad=not frozen)
    model = nn.Sequential(first, nn.Tanh(), second)
    return model.to(dtype) if dtype is torch.float32 else _converted(model, dtype)


def _converted(model: nn.Sequential, dtype: torch.dtype) -> nn.Sequential:
    data = model[0].weight.data.to(dtype)
    for layer in (model[0], model[2]):
        layer.weight.data = data
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_two_parameters_over_one_memory_are_refused(dtype: torch.dtype) -> None:
    """In one process, each had its own main values in fp32, and the second update overwrote the first."""
    config = BF16 if dtype is torch.bfloat16 else OptimizerConfig(lr=1e-2)
    with pytest.raises(ValueError, match=rf"0.weight and 2.weight {SHARED}"):
        get_optimizer(config, [tied(dtype=dtype)], {})


def test_chunks_that_share_memory_are_refused() -> None:
    model = tied()
    with pytest.raises(ValueError, match=SHARED):
        get_optimizer(BF16, [model[0], model[2]], {})


def test_a_parameter_that_is_used_twice_is_trained() -> None:
    model = tied()
    model[2].weight = model[0].weight
    optimizer = get_optimizer(BF16, [model], {})
    train(model, optimizer, range(2))
    assert torch.equal(model[0].weight, model[2].weight)


def test_a_frozen_parameter_may_share_memory_that_stays_where_it_is() -> None:
    model = tied(frozen=True)
    train(model, get_optimizer(BF16, [model], {}), range(2))
    assert torch.equal(model[0].weight, model[2].weight)


def buffered(*, frozen: bool) -> nn.Sequential:
    if frozen:
        return tied(frozen=True)
    model = nn.Sequential(nn.Linear(5, 5, bias=False).bfloat16())
    model[0].register_buffer("view", model[0].weight.data[1:3])
    return model


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])
@pytest.mark.parametrize("frozen", [False, True], ids=["buffer", "frozen parameter"])
def test_a_tie_that_moving_into_buffers_would_break_is_refused(wrapped: bool, frozen: bool) -> None:
    """With ZeRO-1 the trained weight moved away, and the other went on with the values of before the first step."""
    shared: dict[str, Any] = {"use_distributed_optimizer": True}

    def rank_main(comm: ThreadComm) -> None:
        axes = Axes(dp=comm, tp=Alone())
        roles = Roles(dense=axes, expert=axes, everyone=comm)
        model = buffered(frozen=frozen)

        def build() -> object:
            if wrapped:
                return DistributedDataParallel(DistributedDataParallelConfig(**shared), model, groups=roles)
            return get_optimizer(OptimizerConfig(lr=1e-2, bf16=True, **shared), [model], {}, pg_collection=roles)

        with pytest.raises(ValueError, match=SHARED):
            build()

    run_threads(2, rank_main)


def test_neighbours_in_one_memory_are_trained() -> None:
    """Views of one tensor that do not overlap, as of a fused weight."""
    fused = torch.zeros(10, 5)
    model = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False))
    for number, layer in enumerate(model):
        layer.weight = nn.Parameter(fused[5 * number : 5 * number + 5])
    optimizer = get_optimizer(OptimizerConfig(lr=1e-2, weight_decay=0.0), [model], {})
    with torch.no_grad():
        fused.fill_(0.1)
    backward(model, 0)
    assert optimizer.step().success
    assert (fused != 0.1).all()
