"""Norms, zeros and finiteness over tensor-, expert- and data-parallel ranks, against float64 on one process."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from parity import Held
from torch import Tensor, nn
from tp_model import cut

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed.buffers.data_parallel import DistributedDataParallel
from opt_distributed.comm.collectives import Alone, Comm
from opt_distributed.comm.groups import Axes, Roles
from opt_distributed.comm.threads import ThreadComm, World, run_threads
from opt_stack import get_optimizer


class Shape(NamedTuple):
    size: tuple[int, ...]
    cut: int | None  # the dim that tensor parallelism cuts; None: every tensor-parallel rank has all of it


DENSE: Mapping[str, Shape] = {"column": Shape((8, 6), 0), "row": Shape((6, 8), 1), "norm": Shape((5,), None)}
EXPERT: Mapping[str, Shape] = {"up": Shape((8, 4), 0), "bias": Shape((7,), None)}


class Place(NamedTuple):
    """Where one of the ranks of a grid is."""

    tp: Comm
    dp: Comm
    expert_dp: Comm
    expert_tp: Comm
    experts: tuple[int, ...]  # of which this rank holds its part
    world: Comm

    @property
    def roles(self) -> Roles:
        dense = Axes(dp=self.dp, tp=self.tp)
        return Roles(dense=dense, expert=Axes(dp=self.expert_dp, tp=self.expert_tp), everyone=self.world)


def comms_of(grid: list[list[int]]) -> dict[int, ThreadComm]:
    """Each rank's communicator in the groups of `grid`, which hold every rank once."""
    worlds = [(group, World(len(group)).comms()) for group in grid]
    return {rank: comm for group, comms in worlds for rank, comm in zip(group, comms, strict=True)}


def run_grid(rank_main: Callable[[Place], Any], *, tp: int, ep: int, etp: int, size: int = 4) -> list[Any]:
    """Megatron-Core's order of ranks: tensor-parallel ranks are neighbours, then data-parallel ones; experts divide the
    same ranks into expert-tensor-parallel neighbours, expert-parallel and expert-data-parallel ones."""

    def grid(inner: int, middle: int) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
        outer = size // inner // middle
        at = [[[o * middle * inner + m * inner + i for i in range(inner)] for m in range(middle)] for o in range(outer)]
        inners = [at[o][m] for o in range(outer) for m in range(middle)]
        outers = [[at[o][m][i] for o in range(outer)] for m in range(middle) for i in range(inner)]
        middles = [[at[o][m][i] for m in range(middle)] for o in range(outer) for i in range(inner)]
        return inners, middles, outers

    tps, dps, _ = grid(tp, size // tp)
    etps, eps, edps = grid(etp, ep)
    tp_of, dp_of, edp_of, etp_of = comms_of(tps), comms_of(dps), comms_of(edps), comms_of(etps)
    expert_of = {rank: group.index(rank) for group in eps for rank in group}

    def start(comm: ThreadComm) -> Any:
        rank = comm.rank
        place = Place(tp_of[rank], dp_of[rank], edp_of[rank], etp_of[rank], (expert_of[rank],), comm)
        return rank_main(place)

    return run_threads(size, start)


class Net(nn.Module):
    """This rank's part of the model; `forward` takes the gradients by name."""

    def __init__(self, place: Place, num_experts: int, *, dense: Mapping[str, Shape] = DENSE):
        super().__init__()
        for name, shape in dense.items():
            self.add_module(name, _held(shape, place.tp))
        for expert in place.experts:
            for name, shape in EXPERT.items() if num_experts else ():
                held = _held(shape, place.expert_tp)
                held.weight.allreduce = False
                self.add_module(f"{name}{expert}", held)

    def forward(self, grads: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([module(grads[name]) for name, module in self.named_children()]).sum()


def _held(shape: Shape, tp: Comm) -> Held:
    held = Held(shape.size, torch.float32, torch.Generator().manual_seed(1))
    held.weight = nn.Parameter(cut(held.weight.detach(), tp.rank, tp.size, dim=shape.cut))
    if shape.cut is not None and tp.size > 1:
        held.weight.tensor_model_parallel, held.weight.partition_dim = True, shape.cut
    return held


def gradients(shapes: Mapping[str, Shape], seed: int, suffix: str = "") -> dict[str, Tensor]:
    """Whole gradients in 64ths, a fifth of them zero."""
    generator = torch.Generator().manual_seed(seed)
    return {f"{n}{suffix}": torch.randint(-2, 3, s.size, generator=generator) / 64 for n, s in shapes.items()}


def parts(place: Place) -> dict[str, Tensor]:
    """This rank's local gradients. An expert receives tokens of all dense replicas, so its gradient is a sum."""
    dense = gradients(DENSE, place.dp.rank)
    found = {name: cut(grad, place.tp.rank, place.tp.size, dim=DENSE[name].cut) for name, grad in dense.items()}
    for expert in place.experts:
        for name, grad in gradients(EXPERT, 100 + 10 * expert + place.expert_dp.rank, str(expert)).items():
            dim = EXPERT[name.rstrip("0123456789")].cut
            found[name] = cut(grad, place.expert_tp.rank, place.expert_tp.size, dim=dim)
    return found


def expected(*, dp: int, ep: int, expert_dp: int) -> tuple[float, int]:
    """Norm and zeros of the mean gradients of the whole model, in float64."""
    means = []
    for name in DENSE:
        means.append(sum(gradients(DENSE, replica)[name].double() for replica in range(dp)) / dp)
    for expert in range(ep):
        for name in EXPERT:
            seeds = range(100 + 10 * expert, 100 + 10 * expert + expert_dp)
            means.append(sum(gradients(EXPERT, seed)[name].double() for seed in seeds) / dp)
    flat = torch.cat([mean.flatten() for mean in means])
    return flat.norm().item(), int((flat == 0).sum())


GRIDS = {
    "tp 4": {"tp": 4, "ep": 1, "etp": 4},
    "ep 4": {"tp": 1, "ep": 4, "etp": 1},
    "tp 4, ep 4": {"tp": 4, "ep": 4, "etp": 1},
    "tp 2, ep 2, etp 2": {"tp": 2, "ep": 2, "etp": 2},
    "tp 2, ep 2": {"tp": 2, "ep": 2, "etp": 1},
    "tp 4, ep 2, etp 2": {"tp": 4, "ep": 2, "etp": 2},
}
KINDS = {"replicated": {}, "flat": {"use_distributed_optimizer": True}}


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grid", GRIDS)
def test_norm_and_zeros_count_every_element_of_dense_parameters_and_experts_once(
    grid: str, kind: str, wrapped: bool
) -> None:
    sizes = GRIDS[grid]
    config = OptimizerConfig(lr=0.01, log_num_zeros_in_grad=True, **KINDS[kind])

    def rank_main(place: Place) -> tuple[float, int | None]:
        model: nn.Module = Net(place, sizes["ep"])
        if wrapped:
            ddp = DistributedDataParallelConfig(use_distributed_optimizer=config.use_distributed_optimizer)
            model = DistributedDataParallel(ddp, model, groups=place.roles)
        optimizer = get_optimizer(config, [model], {}, pg_collection=place.roles)
        model(parts(place)).backward()
        result = optimizer.step()
        assert result.success
        return result.grad_norm, result.num_zeros_in_grad

    norm, zeros = expected(dp=4 // sizes["tp"], ep=sizes["ep"], expert_dp=4 // sizes["ep"] // sizes["etp"])
    for found_norm, found_zeros in run_grid(rank_main, **sizes):
        assert found_norm == pytest.approx(norm, rel=1e-6)
        assert found_zeros == zeros


@pytest.mark.parametrize("bad", [math.inf, math.nan], ids=str)
@pytest.mark.parametrize("where", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["column", "norm", "up", "bias"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_is_not_finite_on_one_rank_stops_every_rank(
    kind: str, name: str, where: int, bad: float
) -> None:
    """Also in a copy that norms do not count: tensor-parallel ranks compute their gradients of a norm separately."""
    config = OptimizerConfig(lr=0.01, **KINDS[kind])

    def rank_main(place: Place) -> bool:
        net = Net(place, 2)
        optimizer = get_optimizer(config, [net], {}, pg_collection=place.roles)
        grads = parts(place)
        if place.world.rank == where:
            key = name if name in grads else f"{name}{place.experts[0]}"
            grads[key].view(-1)[0] = bad
        net(grads).backward()
        before = {n: p.detach().clone() for n, p in net.named_parameters()}
        result = optimizer.step()
        assert not math.isfinite(result.grad_norm)
        assert all(torch.equal(p, before[n]) for n, p in net.named_parameters())
        return result.success

    assert run_grid(rank_main, tp=2, ep=2, etp=2) == [False] * 4


def test_a_nan_in_the_copy_of_a_shared_parameter_stops_every_rank() -> None:
    """`shared` marks the copy that another pipeline stage counts."""

    def rank_main(comm: ThreadComm) -> bool:
        net = Held((6,), torch.float32, torch.Generator().manual_seed(1))
        net.weight.shared = comm.rank == 1
        axes = Axes(dp=Alone(), tp=Alone())
        roles = Roles(dense=axes, expert=axes, everyone=comm)
        optimizer = get_optimizer(OptimizerConfig(lr=0.01), [net], {}, pg_collection=roles)
        net.weight.grad = torch.full((6,), math.nan if comm.rank == 1 else 1.0)
        return optimizer.step().success

    assert run_threads(2, rank_main) == [False, False]


@pytest.mark.parametrize("kind", KINDS)
def test_a_separate_norm_group_is_clipped_by_its_own_norm(kind: str) -> None:
    """SGD without momentum shows the clipped gradients: each norm group is scaled by its own coefficient."""
    norms = {"": 0.5, "mtp": 0.25}  # the model's own; both above the limit
    limit, lr = 0.1, 1.0

    def rank_main(comm: ThreadComm) -> dict[str, Tensor]:
        net = nn.Module()
        net.own, net.mtp = nn.Parameter(torch.zeros(16)), nn.Parameter(torch.zeros(4))
        net.mtp.grad_norm_group = "mtp"
        config = OptimizerConfig(
            optimizer="sgd", sgd_momentum=0.0, weight_decay=0.0, lr=lr, clip_grad=limit, **KINDS[kind]
        )
        axes = Axes(dp=comm, tp=Alone())
        roles = Roles(dense=axes, expert=axes, everyone=comm)
        optimizer = get_optimizer(config, [net], {}, pg_collection=roles)
        net.own.grad, net.mtp.grad = torch.full((16,), norms[""] / 4), torch.full((4,), norms["mtp"] / 2)
        optimizer.step()
        return {"own": net.own.detach().clone(), "mtp": net.mtp.detach().clone()}

    for weights in run_threads(2, rank_main):
        torch.testing.assert_close(weights["own"], torch.full((16,), -lr * limit / 4), rtol=1e-4, atol=0)
        torch.testing.assert_close(weights["mtp"], torch.full((4,), -lr * limit / 2), rtol=1e-4, atol=0)


def test_reloaded_weights_leave_nothing_of_the_old_remainders() -> None:
    """bf16 parameters with 16-bit remainders: main values are exactly the weights that were loaded."""
    net = nn.Linear(7, 5).bfloat16()
    optimizer = get_optimizer(OptimizerConfig(lr=0.01, bf16=True, use_precision_aware_optimizer=True), [net])
    net(torch.ones(2, 7).bfloat16()).sum().backward()
    optimizer.step()
    assert any(not torch.equal(main, main.bfloat16().float()) for main in optimizer.get_parameters())
    loaded = {name: torch.randn(param.shape).bfloat16() for name, param in net.named_parameters()}
    net.load_state_dict(loaded)
    optimizer.reload_model_params()
    for main, param in zip(optimizer.get_parameters(), (p for g in optimizer.param_groups for p in g["params"])):
        assert torch.equal(main, param.float())
