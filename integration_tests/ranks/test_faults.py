"""Over gloo processes: ranks that fail."""

import pytest
import torch
import torch.distributed as dist
from processes import run_processes
from torch import nn

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed.buffers import DistributedDataParallel
from opt_distributed.comm import ProcessGroups
from opt_stack import get_optimizer

FLAT = {"use_distributed_optimizer": True}


def raise_in_backward(wrapped: bool) -> tuple[str, bool]:
    """The last rank raises in its second backward pass; the other proceeds to its step. The error, and whether weights
    of before are kept."""
    group = dist.new_group()
    groups = ProcessGroups(dp=group, expt_dp=group, mp=None, tp_ep_pp=None, intra_dist_opt=group)
    torch.manual_seed(0)
    net: nn.Module = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 13))
    model = DistributedDataParallel(DistributedDataParallelConfig(**FLAT), net, groups=groups) if wrapped else net
    optimizer = get_optimizer(OptimizerConfig(lr=0.1, **FLAT), [model], {}, pg_collection=groups)
    for step in range(2):
        before = [param.detach().clone() for param in net.parameters()]
        try:
            loss = model(torch.ones(2, 8)).square().mean()
            if step == 1 and dist.get_rank() == 1:
                raise RuntimeError("no memory left on this rank")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        except Exception as error:
            return f"{type(error).__name__}: {error}", all(map(torch.equal, before, net.parameters()))
    return "none", False


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])
def test_a_rank_that_raises_in_backward_leaves_the_others_an_error_and_their_weights(wrapped: bool) -> None:
    (waiting, is_kept), raised = run_processes(2, raise_in_backward, wrapped)
    assert raised == ("RuntimeError: no memory left on this rank", True)
    assert waiting.startswith("CollectiveError: step 2, ")
    assert "gradient" in waiting
    assert "bucket 0" in waiting
    assert is_kept
