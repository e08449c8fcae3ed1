"""Training programs that run on any kind of ranks: as threads, or on devices that run their work later."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from data_parallel_net import LAYER_WISE, Config, backward, grid, of_axes
from fake_accelerator import DeferredRank, run_deferred
from torch import Tensor, nn

from opt_distributed import run_threads
from opt_distributed.buffers import DistributedDataParallel, ParamAndGradBuffer, ReducedGrads
from opt_distributed.comm import Alone, Axes
from opt_distributed.comm.threads import ThreadComm
from opt_distributed.layout import ParamShape, flat_layout, whole_layout
from opt_paramgroups import ParamId

OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 16}
SHARDED = {**OVERLAP, "use_distributed_optimizer": True, "overlap_param_gather": True}
WHOLE = {**SHARDED, "bucket_size": 128}
NUM_STEPS = 3
LR = 0.5
Program = Callable[[Axes], list[Tensor]]


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


def batch(step: int, replica: int) -> Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + replica))


def loss_of(net: nn.Module, step: int, axes: Axes) -> Tensor:
    loss: Tensor = net(batch(step, axes.inter.rank * axes.dp.size + axes.dp.rank)).square().mean()
    return loss


def wrapped(config: Config, *, num_microbatches: int = 1, whole: bool = False) -> Program:
    """Train a wrapped model by plain gradient descent; `whole`: no parameter is cut, and shards differ in size."""

    def train(axes: Axes) -> list[Tensor]:
        net = Uneven() if whole else Net()
        of_optimizer = LAYER_WISE if whole else None
        ddp = DistributedDataParallel(config, net, groups=of_axes(axes, Alone()), optimizer_config=of_optimizer)
        assert all(bool(bucket.cuts) == whole for bucket in ddp.synced_buffers[0].plan.layout.buckets)
        for step in range(NUM_STEPS):
            with ddp.no_sync():
                for number in range(1, num_microbatches):
                    backward(loss_of(ddp, step + number * NUM_STEPS, axes))
            backward(loss_of(ddp, step, axes))
            ddp.finish_grad_sync()
            with torch.no_grad():
                for buffer in ddp.synced_buffers:
                    for piece in buffer.owned():
                        flat = buffer.params[piece.id].view(-1)[piece.of_param]
                        flat.sub_(buffer.grad(piece.id, piece.of_param).reshape(-1), alpha=LR)
                    buffer.publish_()
            ddp.zero_grad_buffer()
        ddp.finish_param_sync()
        largest = [torch.tensor(large.largest) for large in ddp.grad_sync.large_grads]
        return [param.detach().clone() for param in net.parameters()] + largest

    return train


def in_the_step(axes: Axes, *, whole: bool = False) -> list[Tensor]:
    """Train a plain model by gradient descent: one bucket at a time is reduced to this rank's shards."""
    net = Uneven() if whole else Net()
    params = {ParamId(0, name): param for name, param in net.named_parameters()}
    shapes = [ParamShape(id=id, shape=tuple(param.shape)) for id, param in params.items()]
    planner = whole_layout if whole else partial(flat_layout, shard_multiple=1)
    layout = planner(shapes, num_shards=axes.dp.size, bucket_size=128 if whole else 16)
    device, dtype = torch.device("cpu"), torch.float32
    grads = ReducedGrads(layout, params, axes, dtype=dtype, device=device)
    memory = ParamAndGradBuffer(
        layout, params, param_dtype=dtype, grad_dtype=dtype, device=device, sharded=True, holds_grads=False
    )
    for step in range(NUM_STEPS):
        net.zero_grad()
        backward(loss_of(net, step, axes))
        grads.reduce_({id: param.grad for id, param in params.items()})
        with torch.no_grad():
            for _, piece in layout.owned(axes.dp.rank):
                params[piece.id].view(-1)[piece.of_param].sub_(grads.piece(piece.id, piece.of_param).view(-1), alpha=LR)
        memory.gather_(axes.dp)
    return [param.detach().clone() for param in net.parameters()]


def in_order(program: Program, *, instances: int = 1) -> list[list[Tensor]]:
    """What the program computes where every operation is done when it returns."""
    worlds = grid()

    def rank_main(comm: ThreadComm) -> list[Tensor]:
        return program(worlds(comm.rank) if instances > 1 else Axes(dp=comm, tp=Alone()))

    return run_threads(2 * instances, rank_main)


def in_some_order(program: Program, *, seed: int, instances: int = 1) -> list[list[Tensor]]:
    """What it computes on devices that run their work later."""

    def rank_main(rank: DeferredRank) -> list[Tensor]:
        instance, shard = divmod(rank.rank, 2)
        inter = rank.comm_over(range(shard, 2 * instances, 2)) if instances > 1 else Alone()
        return program(Axes(dp=rank.comm_over((2 * instance, 2 * instance + 1)), tp=Alone(), inter=inter))

    return run_deferred(2 * instances, rank_main, seed=seed)


def are_equal(found: Sequence[Sequence[Tensor]], expected: Sequence[Sequence[Tensor]]) -> bool:
    """Bit by bit, on all ranks."""
    return all(torch.equal(x, y) for a, b in zip(found, expected, strict=True) for x, y in zip(a, b))
