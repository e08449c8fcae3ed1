"""Every element counts once in a step's statistics, where faults went unnoticed. Threads."""

import math

import pytest
import torch
from torch import nn

from opt_config import OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.comm import Alone, Axes, Roles
from opt_distributed.comm.threads import ThreadComm, World
from opt_stack import get_optimizer

SPREADS = pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "flat"])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Parameter(torch.ones(40)), nn.Parameter(torch.ones(33))


@SPREADS
def test_zeros_that_stand_for_missing_gradients_are_not_counted(sharded: bool) -> None:
    def rank_main(comm: ThreadComm) -> int | None:
        net = Net()
        axes = Axes(dp=comm, tp=Alone())
        config = OptimizerConfig(lr=0.1, log_num_zeros_in_grad=True, use_distributed_optimizer=sharded)
        optimizer = get_optimizer(config, [net], {}, pg_collection=Roles(dense=axes, expert=axes, everyone=comm))
        net.used.grad = (torch.arange(40) % 8 > 0).float()
        return optimizer.step().num_zeros_in_grad

    assert run_threads(3, rank_main) == [5, 5, 5]


@SPREADS
def test_the_norm_counts_one_optimizer_instance(sharded: bool) -> None:
    """Two instances of two shards, whose statistics are summed over all four ranks."""
    rows, columns = [World(2), World(2)], [World(2), World(2)]

    def rank_main(comm: ThreadComm) -> float:
        instance, shard = divmod(comm.rank, 2)
        net = Net()
        axes = Axes(dp=ThreadComm(rows[instance], shard), tp=Alone(), inter=ThreadComm(columns[shard], instance))
        config = OptimizerConfig(lr=0.1, use_distributed_optimizer=sharded)
        optimizer = get_optimizer(config, [net], {}, pg_collection=Roles(dense=axes, expert=axes, everyone=comm))
        net.used.grad, net.unused.grad = torch.full((40,), float(comm.rank)), torch.full((33,), 2.0 * comm.rank)
        return optimizer.step().grad_norm

    assert run_threads(4, rank_main) == pytest.approx([math.sqrt(40 * 1.5**2 + 33 * 3.0**2)] * 4)


def test_a_norm_group_without_parameters_has_the_norm_0_after_a_nan() -> None:
    """It was infinite: `{'': nan, 'mtp': inf}`."""
    net = Net()
    optimizer = get_optimizer(OptimizerConfig(lr=0.1), [net], {})
    net.used.grad = torch.full((40,), math.nan)
    assert not optimizer.step().success
    norms = optimizer.grad_norms_by_group
    assert math.isnan(norms[""])
    assert norms["mtp"] == 0.0
