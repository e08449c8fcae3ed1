"""Chunks whose gradients sum to known numbers, whatever order the ranks visit them in."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from opt_config import DistributedDataParallelConfig
from opt_distributed.buffers import DistributedDataParallel

REPLICATED = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=1)
SHARDED = replace(REPLICATED, use_distributed_optimizer=True, overlap_param_gather=True)
configs = pytest.mark.parametrize("config", [REPLICATED, SHARDED], ids=["replicated", "sharded"])
Visit = tuple[int, str]  # a chunk and a parameter of it, whose gradient a backward pass brings


class Sums(nn.Module):
    """Vectors, each of which is used alone; a name with "expert" in it is an expert's."""

    def __init__(self, sizes: Mapping[str, int]):
        super().__init__()
        self.vectors = nn.ParameterDict({name: nn.Parameter(torch.zeros(n).double()) for name, n in sizes.items()})
        for name, param in self.vectors.items():
            if "expert" in name:
                param.allreduce = False

    def forward(self, name: str, factor: float) -> Tensor:
        return self.vectors[name].sum() * factor


def factor(rank: int, iteration: int, visit: Visit) -> float:
    """The gradient of every element of a vector: another power of two plus a part that differs between ranks."""
    chunk, name = visit
    return float(2 ** (4 * chunk + sum(map(ord, name)) % 16)) * (1 + rank) + iteration


def check_owned(chunk: DistributedDataParallel, name: str, expected: float) -> None:
    for buffer in chunk.synced_buffers:
        for piece in buffer.owned():
            if piece.id.name == f"vectors.{name}":
                found = buffer.grad(piece.id, piece.of_param)
                assert found.unique().tolist() == [expected], (name, found, expected)
