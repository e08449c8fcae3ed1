"""Parameters moved out of the buffer that the step updates are an error of the next step, on every rank. Threads."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity import Net, grads_of, roles_over
from torch import nn

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.buffers import DistributedDataParallel
from opt_distributed.comm.threads import ThreadComm
from opt_stack import get_optimizer


def _assign(net: nn.Module) -> None:
    net.second.weight.data = net.second.weight.detach().clone()


MOVES: dict[str, Callable[[nn.Module], Any]] = {
    "half": lambda net: net.half(),
    "back and forth": lambda net: net.double().float(),
    "param.data": _assign,
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("spread", ["plain", "wrapped"])
@pytest.mark.parametrize("everywhere", [True, False], ids=["on all ranks", "on rank 1"])
def test_sharded_parameters_that_left_their_buffer_stop_every_rank(spread: str, move: str, everywhere: bool) -> None:
    def rank_main(comm: ThreadComm) -> str:
        net, roles = Net(torch.float32), roles_over(comm)
        model: nn.Module = net
        if spread == "wrapped":
            ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
            model = DistributedDataParallel(ddp, net, groups=roles)
        optimizer = get_optimizer(
            OptimizerConfig(lr=0.01, use_distributed_optimizer=True), [model], pg_collection=roles
        )
        model(grads_of(0, comm.rank, 2)).backward()
        assert optimizer.step().success
        if isinstance(model, DistributedDataParallel):
            model.zero_grad_buffer()
        optimizer.zero_grad()
        if everywhere or comm.rank == 1:
            MOVES[move](net)
        model(grads_of(1, comm.rank, 2)).backward()
        before = {name: param.detach().clone() for name, param in net.named_parameters()}
        with pytest.raises(ValueError, match="has left the memory that the optimizer updates") as caught:
            optimizer.step()
        assert all(torch.equal(param, before[name]) for name, param in net.named_parameters())
        return str(caught.value)

    message = run_threads(2, rank_main)
    assert message[1].startswith("parameter '")
    assert message[0].startswith("parameter '" if everywhere else "a parameter on 1 other rank(s)")


@pytest.mark.parametrize("size", [1, 2])
def test_replicated_parameters_follow_param_data_and_refuse_another_dtype(size: int) -> None:
    def rank_main(comm: ThreadComm) -> None:
        net = Net(torch.float32)
        optimizer = get_optimizer(OptimizerConfig(lr=0.01), [net], pg_collection=roles_over(comm))
        _assign(net)
        before = net.second.weight.detach().clone()
        net(grads_of(0, comm.rank, size)).backward()
        assert optimizer.step().success
        assert not torch.equal(net.second.weight, before)
        optimizer.zero_grad()
        net.bfloat16()
        net(grads_of(1, comm.rank, size)).backward()
        with pytest.raises(ValueError, match="has left the memory that the optimizer updates"):
            optimizer.step()

    run_threads(size, rank_main)
