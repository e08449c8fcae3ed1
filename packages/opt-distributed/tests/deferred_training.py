"""Training programs that run on any kind of ranks: as threads, or on devices that run their work later."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from fake_accelerator import DeferredRank, run_deferred
from torch import Tensor, nn

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.buffers import DistributedDataParallel, ParamAndGradBuffer, ReducedGrads
from opt_distributed.comm import Alone, Axes, Comm, Roles
from opt_distributed.comm.threads import ThreadComm, World
from opt_distributed.layout import Layout, ParamShape, flat_layout, whole_layout
from opt_paramgroups import ParamId

Config = DistributedDataParallelConfig
OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 16}
SHARDED = {**OVERLAP, "use_distributed_optimizer": True, "overlap_param_gather": True}
WHOLE = {**SHARDED, "bucket_size": 128}
NUM_STEPS = 3
LR = 0.5


class Net(nn.Module):
    """Three layers of a bucket each, small enough for hundreds of runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        numbers = torch.Generator().manual_seed(3)
        for param in self.parameters():
            param.data.copy_(torch.randn(param.shape, generator=numbers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Uneven(nn.Module):
    """Three buckets of whole parameters, of which one of two ranks owns four vectors and the other a matrix."""

    def __init__(self) -> None:
        super().__init__()
        numbers = torch.Generator().manual_seed(3)
        shapes = [(16, 4), (1, 16), (1, 16), (1, 16), (1, 16)] * 3
        self.values = nn.ParameterList(nn.Parameter(torch.randn(shape, generator=numbers)) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        for at in range(0, len(self.values), 5):
            weight, a, b, c, d = self.values[at : at + 5]
            x = (torch.tanh(x @ weight.T * a + b) * c + d)[:, :4]
        return x


class Replicas(NamedTuple):
    """The data-parallel groups of one rank."""

    dp: Comm
    inter: Comm

    @property
    def axes(self) -> Axes:
        return Axes(dp=self.dp, tp=Alone(), inter=self.inter)

    @property
    def number(self) -> int:
        """Of this rank among all."""
        return self.inter.rank * self.dp.size + self.dp.rank


Program = Callable[[Replicas], list[Tensor]]

LAYER_WISE = OptimizerConfig(optimizer="muon", use_layer_wise_distributed_optimizer=True)


def batch(step: int, replica: int) -> Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + replica))


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def wrapped(config: Config, *, num_microbatches: int = 1, whole: bool = False) -> Program:
    """Train a wrapped model by plain gradient descent; `whole`: no parameter is cut, and shards differ in size."""

    def train(replicas: Replicas) -> list[Tensor]:
        net = Uneven() if whole else Net()
        groups = Roles(dense=replicas.axes, expert=replicas.axes, everyone=Alone())
        ddp = DistributedDataParallel(config, net, groups=groups, optimizer_config=LAYER_WISE if whole else None)
        assert all(bool(bucket.cuts) == whole for bucket in ddp.synced_buffers[0].plan.layout.buckets)
        for step in range(NUM_STEPS):
            with ddp.no_sync():
                for number in range(1, num_microbatches):
                    backward(ddp(batch(step + number * NUM_STEPS, replicas.number)).square().mean())
            backward(ddp(batch(step, replicas.number)).square().mean())
            ddp.finish_grad_sync()
            _descend(ddp, net, replicas.dp.rank)
            ddp.zero_grad_buffer()
        ddp.finish_param_sync()
        largest = [torch.tensor(large.largest) for large in ddp.grad_sync.large_grads]
        return [param.detach().clone() for param in net.parameters()] + largest

    return train


@torch.no_grad()
def _descend(ddp: DistributedDataParallel, net: nn.Module, rank: int) -> None:
    params = dict(net.named_parameters())
    for buffer in ddp.synced_buffers:
        for piece in buffer.owned():
            flat = params[piece.id.name].view(-1)[piece.of_param]
            flat.sub_(buffer.grad(piece.id, piece.of_param).reshape(-1), alpha=LR)
        buffer.publish_()


def in_the_step(replicas: Replicas) -> list[Tensor]:
    """Train a plain model by gradient descent: one bucket at a time is reduced to this rank's shards."""
    return _train_plain(replicas, Net(), partial(flat_layout, bucket_size=16, shard_multiple=1))


def whole_in_the_step(replicas: Replicas) -> list[Tensor]:
    """The same for whole parameters."""
    return _train_plain(replicas, Uneven(), partial(whole_layout, bucket_size=128))


def _train_plain(replicas: Replicas, net: nn.Module, planner: Callable[..., Layout]) -> list[Tensor]:
    params = {ParamId(0, name): param for name, param in net.named_parameters()}
    shapes = [ParamShape(id=id, shape=tuple(param.shape)) for id, param in params.items()]
    layout = planner(shapes, num_shards=replicas.dp.size)
    place = torch.device("cpu")
    dtype = torch.float32
    grads = ReducedGrads(layout, params, replicas.axes, dtype=dtype, device=place)
    memory = ParamAndGradBuffer(
        layout, params, param_dtype=dtype, grad_dtype=dtype, device=place, sharded=True, holds_grads=False
    )
    for step in range(NUM_STEPS):
        net.zero_grad()
        backward(net(batch(step, replicas.number)).square().mean())
        grads.reduce_({id: param.grad for id, param in params.items()})
        with torch.no_grad():
            for _, piece in layout.owned(replicas.dp.rank):
                params[piece.id].view(-1)[piece.of_param].sub_(grads.piece(piece.id, piece.of_param).view(-1), alpha=LR)
        memory.gather_(replicas.dp)
    return [param.detach().clone() for param in net.parameters()]


def in_order(program: Program, *, instances: int = 1) -> list[list[Tensor]]:
    """What the program computes where every operation is done when it returns."""
    rows = [World(2) for _ in range(instances)]
    columns = [World(instances) for _ in range(2)]

    def rank_main(comm: ThreadComm) -> list[Tensor]:
        instance, shard = divmod(comm.rank, 2)
        inter = ThreadComm(columns[shard], instance) if instances > 1 else Alone()
        return program(Replicas(ThreadComm(rows[instance], shard), inter))

    return run_threads(2 * instances, rank_main)


def in_some_order(program: Program, *, seed: int, instances: int = 1) -> list[list[Tensor]]:
    """What it computes on devices that run their work later."""

    def rank_main(one: DeferredRank) -> list[Tensor]:
        instance, shard = divmod(one.rank, 2)
        inter = one.comm_over(range(shard, 2 * instances, 2)) if instances > 1 else Alone()
        return program(Replicas(one.comm_over((2 * instance, 2 * instance + 1)), inter))

    return run_deferred(2 * instances, rank_main, seed=seed)


def are_equal(found: Sequence[Sequence[Tensor]], expected: Sequence[Sequence[Tensor]]) -> bool:
    """Bit by bit, on all ranks."""
    return all(torch.equal(one, other) for a, b in zip(found, expected, strict=True) for one, other in zip(a, b))
