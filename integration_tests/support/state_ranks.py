"""Rank programs for the tests of saved optimizer state that several ranks or chunks share."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opt_checkpoint import ShardedTensor, ShardedTensorFactory, load, save
from opt_config import OptimizerConfig
from opt_distributed.comm.groups import ProcessGroups
from opt_stack import Optimizer, get_optimizer


class Net(nn.Module):
    """A fused SwiGLU weight, a matrix, and a parameter without elements."""

    def __init__(self, seed: int, dtype: torch.dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.fused = nn.Parameter(torch.rand(24, 10, generator=generator).to(dtype))
        self.plain = nn.Parameter(torch.rand(9, 7, generator=generator).to(dtype))
        self.none = nn.Parameter(torch.zeros(0, 7, dtype=dtype))

    def sharded(self, replica: int) -> dict[str, Any]:
        """Sharded state as in Megatron-Core: a factory builds the fused weight from two halves of one key."""

        def build(key: str, data: Tensor, replica_id: Any, flat: slice | None) -> list[ShardedTensor]:
            halves = enumerate(data.chunk(2))
            return [ShardedTensor.from_rank_offsets(key, h, (0, i, 2), replica_id=replica_id) for i, h in halves]

        replica_id = (0, 0, replica)
        return {
            "fused": ShardedTensorFactory("fused", self.fused, build, torch.cat, replica_id),
            "plain": ShardedTensor.from_rank_offsets("plain", self.plain, replica_id=replica_id),
            "none": ShardedTensor.from_rank_offsets("none", self.none, replica_id=replica_id),
        }


def config(sharded: bool, bf16: bool, instances: int = 1) -> OptimizerConfig:
    return OptimizerConfig(lr=0.02, clip_grad=0.0, bf16=bf16, use_distributed_optimizer=sharded)


def groups_of(instances: int) -> ProcessGroups | None:
    """Ranks 0 and 1 are one optimizer instance, 2 and 3 another."""
    if instances == 1:
        return None
    world = dist.group.WORLD
    size, rank = dist.get_world_size() // instances, dist.get_rank()
    intra = [dist.new_group(list(range(i * size, (i + 1) * size))) for i in range(instances)][rank // size]
    inter = [dist.new_group(list(range(k, instances * size, size))) for k in range(size)][rank % size]
    return ProcessGroups(
        dp=world,
        dp_cp=world,
        expt_dp=world,
        mp=None,
        tp_ep_pp=None,
        intra_dist_opt=intra,
        inter_dist_opt=inter,
        intra_dp_cp=intra,
        intra_expt_dp=intra,
    )


def begin(seed: int, *, sharded: bool, bf16: bool, instances: int = 1) -> tuple[Net, Optimizer]:
    net = Net(seed, torch.bfloat16 if bf16 else torch.float32)
    return net, get_optimizer(config(sharded, bf16), [net], {}, pg_collection=groups_of(instances))


def step(net: Net, optimizer: Optimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(100 + number)
    for param in net.parameters():
        param.grad = torch.rand(param.shape, generator=generator).to(param.dtype)
    assert optimizer.step().success


def state_of(net: Net, optimizer: Optimizer) -> dict[str, Any]:
    replica = dist.get_rank() if dist.is_initialized() else 0
    weights = net.sharded(replica)
    return {"model": weights, "optimizer": optimizer.sharded_state_dict(weights)}


def weights(net: Net) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in net.named_parameters()}


def train_and_save(path: str, sharded: bool, bf16: bool, instances: int = 1) -> dict[str, Tensor]:
    """Final weights of a run that is saved after two steps."""
    net, optimizer = begin(0, sharded=sharded, bf16=bf16, instances=instances)
    for number in range(2):
        step(net, optimizer, number)
    save(state_of(net, optimizer), path)
    step(net, optimizer, 2)
    return weights(net)


def resume(path: str, sharded: bool, bf16: bool, instances: int = 1) -> dict[str, Tensor]:
    net, optimizer = begin(1, sharded=sharded, bf16=bf16, instances=instances)
    optimizer.load_state_dict(load(state_of(net, optimizer), path).state["optimizer"])
    step(net, optimizer, 2)
    return weights(net)
