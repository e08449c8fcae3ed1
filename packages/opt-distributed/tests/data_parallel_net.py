"""A small model, its batches, and the configurations of the wrapper that tests go through."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed import ParamAndGradBuffer
from opt_distributed.buffers import DistributedDataParallel
from opt_distributed.comm import Alone, Axes, Comm, Roles
from opt_distributed.comm.collectives import Pending
from opt_distributed.comm.threads import ThreadComm, World

Config = DistributedDataParallelConfig


class Net(nn.Module):
    """A model with odd sizes, a tied weight and a norm. In float64 sums agree to 1e-12."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 10)
        self.layers = nn.ModuleList(nn.Linear(10, 10) for _ in range(4))
        self.norm = nn.LayerNorm(10)
        self.double()
        numbers = torch.Generator().manual_seed(3)
        for param in self.parameters():
            param.data.copy_(torch.randn(param.shape, generator=numbers, dtype=torch.float64) / 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return nn.functional.linear(self.norm(x), self.embed.weight)


def batch(iteration: int, size: int) -> Tensor:
    return torch.randint(13, (size, 6), generator=torch.Generator().manual_seed(100 + iteration))


def over(comm: Comm, across: Comm | None = None) -> Roles:
    return of_axes(Axes(dp=comm, tp=Alone(), inter=across or Alone()), comm)


def of_axes(axes: Axes, everyone: Comm) -> Roles:
    return Roles(dense=axes, expert=axes, everyone=everyone)


def grid() -> Callable[[int], Axes]:
    """Rank r of 4 as shard r % 2 of optimizer instance r // 2; call the result once on each rank."""
    rows = [World(2) for _ in range(2)]
    columns = [World(2) for _ in range(2)]

    def axes(rank: int) -> Axes:
        instance, shard = divmod(rank, 2)
        return Axes(dp=ThreadComm(rows[instance], shard), tp=Alone(), inter=ThreadComm(columns[shard], instance))

    return axes


def bucket_of(memory: ParamAndGradBuffer, index: int) -> Tensor:
    """The parameters of a bucket, padding included."""
    bucket = memory.layout.buckets[index]
    assert memory.param_data is not None
    return memory.param_data[bucket.start : bucket.stop]


def shard_of(memory: ParamAndGradBuffer, index: int, rank: int) -> Tensor:
    """Rank `rank`'s shard of the parameters of a bucket."""
    assert memory.param_data is not None
    return memory.param_data[memory.layout.buckets[index].shard(rank, memory.layout.num_shards)]


def check_owned(ddp: DistributedDataParallel, expected: Mapping[str, Tensor], *, rtol: float = 1e-12) -> int:
    """Compares every gradient that this rank owns; returns how many elements these have."""
    pieces = [(buffer, piece) for buffer in ddp.synced_buffers for piece in buffer.owned()]
    for buffer, piece in pieces:
        wanted = expected[piece.id.name].flatten()[piece.of_param]
        torch.testing.assert_close(buffer.grad(piece.id, piece.of_param).flatten(), wanted, rtol=rtol, atol=rtol / 100)
    return sum(piece.numel for _, piece in pieces)


def all_equal(tensors: Iterable[Tensor], value: float) -> bool:
    return all(bool((tensor == value).all()) for tensor in tensors)


def backward(loss: Tensor, **kwargs: bool) -> None:
    loss.backward(**kwargs)  # type: ignore[no-untyped-call]


class Unfinished(Alone):
    """A world of one rank whose reductions in fp32 complete only when they are awaited."""

    def all_to_all_(self, out: Tensor, x: Tensor, **kwargs: object) -> Pending:
        return self

    def wait(self) -> None:
        return None


LAYER_WISE = OptimizerConfig(optimizer="muon", use_layer_wise_distributed_optimizer=True)
SHARDED = Config(use_distributed_optimizer=True)
OVERLAP = Config(use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=150)
CASES: dict[str, tuple[Config, OptimizerConfig | None]] = {  # ways to wrap the model
    "replicated": (Config(), None),
    "replicated, overlap": (Config(overlap_grad_reduce=True, bucket_size=150), None),
    "replicated, average after": (Config(average_in_collective=True), None),
    "flat": (SHARDED, None),
    "flat, overlap": (OVERLAP, None),
    "flat, overlap, average after": (replace(OVERLAP, average_in_collective=True), None),
    "flat, high busbw": (replace(SHARDED, pad_buckets_for_high_nccl_busbw=True), None),
    "whole": (SHARDED, LAYER_WISE),
    "whole, overlap": (OVERLAP, LAYER_WISE),
}
