"""A backward pass through a graph of before the step raises, as with torch's optimizers; its gradients are wrong."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from stack_models import FEATURES, make_model
from torch import Tensor, nn

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed.comm.collectives import Alone
from opt_distributed.comm.groups import Axes, Roles
from opt_distributed.comm.threads import ThreadComm, run_threads
from opt_kernels.optim import AdamW, Lion
from opt_stack import DistributedDataParallel, get_optimizer

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
