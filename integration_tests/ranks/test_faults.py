"""Over gloo processes: ranks that fail."""

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from processes import run_processes
from torch import nn

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed.buffers import DistributedDataParallel
from opt_distributed.comm import ProcessGroups
from opt_stack import get_optimizer


class Outcome(NamedTuple):
    error: str
    changed: bool  # any weight


def raise_in_backward(wrapped: bool) -> Outcome:
    """The last rank raises in its second backward pass; the other proceeds to its step."""
    group = dist.new_group()
    groups = ProcessGroups(dp=group, expt_dp=group, mp=None, tp_ep_pp=None, intra_dist_opt=group)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 13))
    model: nn.Module = net
    if wrapped:
        model = DistributedDataParallel(
            DistributedDataParallelConfig(use_distributed_optimizer=True), net, groups=groups
        )
    config = OptimizerConfig(lr=0.1, use_distributed_optimizer=True)
    optimizer = get_optimizer(config, [model], {}, pg_collection=groups)
    before = None
    try:
        for step in range(2):
            before = [p.detach().clone() for p in net.parameters()]
            loss = model(torch.ones(2, 8)).square().mean()
            if step == 1 and dist.get_rank() == 1:
                raise RuntimeError("no memory left on this rank")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    except Exception as error:
        changed = any(not torch.equal(a, b) for a, b in zip(before or (), net.parameters(), strict=True))
        return Outcome(f"{type(error).__name__}: {error}", changed)
    return Outcome("", True)


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])
def test_a_rank_that_raises_in_backward_leaves_the_others_an_error_and_their_weights(wrapped: bool) -> None:
    waiting, raised = run_processes(2, raise_in_backward, wrapped)
    assert (raised.error, raised.changed) == ("RuntimeError: no memory left on this rank", False)
    assert waiting.error.startswith("CollectiveError: step 2, ")
    assert "gradient" in waiting.error
    assert "bucket 0" in waiting.error
    assert not waiting.changed
