"""DTensor parameters: every rank updates its shard, and state dicts hold DTensors. Run as a program, it is one rank."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from opt_kernels import optim

WORLD = 2


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
    return port


def _steps(optimizer: torch.optim.Optimizer, param: torch.nn.Parameter, grads: Sequence[torch.Tensor]) -> None:
    for grad in grads:
        param.grad = grad
        optimizer.step()


def _rank(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (WORLD,))
    torch.manual_seed(0)
    # 256 rows of 5: rank shards of 640 elements, a multiple of 64 and of a block.
    start, grads = torch.randn(256, 5), [torch.randn(256, 5) for _ in range(3)]
    choices: list[dict[str, Any]] = [{}, {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8}]
    for options in choices:
        whole = torch.nn.Parameter(start.clone())
        _steps(optim.AdamW([whole], **options), whole, grads)
        param = torch.nn.Parameter(distribute_tensor(start, mesh, [Shard(0)]))
        optimizer = optim.AdamW([param], **options)
        sharded = [distribute_tensor(grad, mesh, [Shard(0)]) for grad in grads]
        _steps(optimizer, param, sharded[:2])
        saved = optimizer.state_dict()
        exp_avg = saved["state"][0]["exp_avg"]
        assert isinstance(exp_avg, DTensor)
        assert exp_avg.shape == (256, 5)
        assert exp_avg.placements == (Shard(0),)
        resumed = optim.AdamW([param], **options)
        resumed.load_state_dict(saved)
        _steps(resumed, param, sharded[2:])
        assert isinstance(param.data, DTensor)
        assert torch.equal(param.data.full_tensor(), whole.detach())
    with pytest.raises(ValueError, match="its norm spans ranks"):
        optim.AdamW([param], max_norm=1.0).step()
    dist.destroy_process_group()


def test_shards_move_as_the_whole_does() -> None:
    port = str(_free_port())
    ranks = [subprocess.Popen([sys.executable, __file__, str(rank), port]) for rank in range(WORLD)]
    assert [rank.wait(timeout=120) for rank in ranks] == [0] * WORLD


if __name__ == "__main__":
    _rank(int(sys.argv[1]), int(sys.argv[2]))
