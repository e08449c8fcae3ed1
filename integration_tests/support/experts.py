"""A model with experts on a grid of expert, tensor and data parallelism, with exact gradients."""

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from parity import Held
from torch import Tensor, nn
from tp_model import comms_of, cut

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed.buffers.data_parallel import DistributedDataParallel
from opt_distributed.buffers.grouping import matrices_whole, nothing_whole
from opt_distributed.comm.collectives import Alone, Comm
from opt_distributed.comm.groups import Axes, Roles
from opt_distributed.comm.threads import ThreadComm, run_threads
from opt_stack import get_optimizer

EP = 2  # as many experts
STEPS = 2

# name: whole shape, the dim that tensor parallelism cuts; None: every tensor-parallel rank has all of it
DENSE: Mapping[str, tuple[tuple[int, ...], int | None]] = {"column": ((24, 16), 0), "norm": ((65,), None)}
EXPERT: Mapping[str, tuple[tuple[int, ...], int | None]] = {
    "up": ((26, 16), 0),
    "down": ((16, 26), 1),
    "bias": ((19,), None),
}


class Place(NamedTuple):
    """Where a rank is; a process that holds everything has one replica and all experts."""

    tp: Comm
    roles: Roles
    experts: tuple[int, ...]
    replica: int  # of num_replicas of the dense parameters
    num_replicas: int


class Net(nn.Module):
    """A rank's part; `forward` takes its gradients by name."""

    def __init__(self, place: Place):
        super().__init__()
        for name, (shape, dim) in DENSE.items():
            self.add_module(name, _held(shape, dim, place.tp, seed=1))
        for expert in place.experts:
            for name, (shape, dim) in EXPERT.items():
                held = _held(shape, dim, place.tp, seed=2 + expert)
                held.weight.allreduce = False
                self.add_module(f"{name}{expert}", held)

    def forward(self, grads: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([module(grads[name]) for name, module in self.named_children()]).sum()


def _held(shape: tuple[int, ...], dim: int | None, tp: Comm, *, seed: int) -> Held:
    held = Held(shape, torch.float32, torch.Generator().manual_seed(seed))
    held.weight = nn.Parameter(cut(held.weight.detach(), tp.rank, tp.size, dim=dim))
    if dim is not None and tp.size > 1:
        held.weight.tensor_model_parallel, held.weight.partition_dim = True, dim
    return held


def _grads(step: int, replica: int, expert: int | None) -> dict[str, Tensor]:
    """Whole gradients of one dense replica, in 64ths, zeros among them: any mean of a power of two is exact."""
    generator = torch.Generator().manual_seed(100 * step + 10 * replica + (9 if expert is None else expert))
    shapes = DENSE if expert is None else EXPERT
    suffix = "" if expert is None else str(expert)
    return {
        f"{name}{suffix}": torch.randint(-2, 3, shape, generator=generator) / 64 for name, (shape, _) in shapes.items()
    }


def _dim(name: str) -> int | None:
    return {**DENSE, **EXPERT}[name.rstrip("0123456789")][1]


def grads_here(step: int, place: Place) -> dict[str, Tensor]:
    """This rank's local gradients: of its replica, and of the tokens routed to its experts."""
    found = _grads(step, place.replica, None)
    for expert in place.experts:
        found |= _grads(step, place.replica, expert)
    return {name: cut(grad, place.tp.rank, place.tp.size, dim=_dim(name)) for name, grad in found.items()}


def grads_alone(step: int, num_replicas: int, rows: Mapping[int, list[int]]) -> dict[str, Tensor]:
    """The same for one process: means over all replicas; `rows`: the replicas that each expert's tokens came from."""
    parts = [_grads(step, replica, None) for replica in range(num_replicas)]
    for expert, replicas in rows.items():
        parts += [_grads(step, replica, expert) for replica in replicas]
    total: dict[str, Tensor] = {}
    for part in parts:
        for name, grad in part.items():
            total[name] = total.get(name, torch.zeros_like(grad)) + grad / num_replicas
    return total


class Trained(NamedTuple):
    weights: dict[str, Tensor]
    message: list[tuple[float, int | None]]  # norm and zeros of each step


def train(
    config: OptimizerConfig, place: Place, grads: Callable[[int], dict[str, Tensor]], *, wrapped: bool = False
) -> Trained:
    net = Net(place)
    model: nn.Module = net
    if wrapped:
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=config.use_distributed_optimizer or config.use_layer_wise_distributed_optimizer,
            num_distributed_optimizer_instances=place.roles.dense.inter.size,
        )
        is_whole = matrices_whole if config.use_layer_wise_distributed_optimizer else nothing_whole
        model = DistributedDataParallel(ddp, net, groups=place.roles, is_whole=is_whole)
    optimizer = get_optimizer(config, [model], {}, pg_collection=place.roles)
    message = []
    for step in range(STEPS):
        model(grads(step)).backward()
        result = optimizer.step()
        assert result.success
        message.append((result.grad_norm, result.num_zeros_in_grad))
        optimizer.zero_grad()
        if isinstance(model, DistributedDataParallel):
            model.zero_grad_buffer()
    return Trained({name: held.weight.detach().clone() for name, held in net.named_children()}, message)


def train_alone(config: OptimizerConfig, num_replicas: int, rows: Mapping[int, list[int]]) -> Trained:
    axes = Axes(dp=Alone(), tp=Alone())
    roles = Roles(dense=axes, expert=axes, everyone=Alone())
    place = Place(Alone(), roles, tuple(range(EP)), 0, 1)
    return train(config, place, lambda step: grads_alone(step, num_replicas, rows))


def assert_same(ranks: list[tuple[Place, Trained]], alone: Trained) -> None:
    """Norms are summed in another order, which moves the clip coefficient and so updates of lr = 0.02 by a few
    2**-24; zeros are counted exactly."""
    for place, trained in ranks:
        for name, weight in trained.weights.items():
            whole = cut(alone.weights[name], place.tp.rank, place.tp.size, dim=_dim(name))
            torch.testing.assert_close(weight, whole, rtol=2e-5, atol=2e-5)
        assert [zeros for _, zeros in trained.message] == [zeros for _, zeros in alone.message]
        assert [norm for norm, _ in trained.message] == pytest.approx([norm for norm, _ in alone.message], rel=1e-6)


def config(**changes: Any) -> OptimizerConfig:
    base = {"lr": 0.02, "clip_grad": 0.1, "log_num_zeros_in_grad": True, "muon_fp32_matmul_prec": "highest"}
    return OptimizerConfig(**{**base, **changes})


SPREADS: Mapping[str, dict[str, Any]] = {
    "adam replicated": {},
    "adam flat": {"use_distributed_optimizer": True},
    "muon replicated": {"optimizer": "muon", "muon_tp_mode": "duplicated"},
    "muon whole": {
        "optimizer": "muon",
        "muon_tp_mode": "distributed",
        "use_layer_wise_distributed_optimizer": True,
    },
}
plain_or_wrapped = pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])


def assert_step_of_one(made: OptimizerConfig, expert_replicas: int = 1, *, wrapped: bool) -> None:
    """EP 2 x TP 2: matrices of each expert are cut, its bias is on both tensor-parallel ranks."""
    replicas = EP * expert_replicas
    size = 2 * replicas  # rank = 2 * replica + tp; a replica holds expert replica % EP
    tp = comms_of([[2 * replica, 2 * replica + 1] for replica in range(replicas)])
    dp = comms_of([[2 * replica + t for replica in range(replicas)] for t in range(2)])
    expert_dp = comms_of([[2 * r + t for r in range(replicas) if r % EP == e] for e, t in product(range(EP), range(2))])

    def rank_main(comm: ThreadComm) -> tuple[Place, Trained]:
        rank, replica = comm.rank, comm.rank // 2
        dense = Axes(dp=dp[rank], tp=tp[rank])
        roles = Roles(dense=dense, expert=Axes(dp=expert_dp[rank], tp=tp[rank]), everyone=comm)
        place = Place(tp[rank], roles, (replica % EP,), replica, replicas)
        return place, train(made, place, lambda step: grads_here(step, place), wrapped=wrapped)

    rows = {expert: [r for r in range(replicas) if r % EP == expert] for expert in range(EP)}
    assert_same(run_threads(size, rank_main), train_alone(made, replicas, rows))
