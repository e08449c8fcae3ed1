"""A model with experts on a grid of ranks, whose gradients have known norms and zeros."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from parity import Held
from torch import Tensor, nn
from tp_model import comms_of, cut

from opt_distributed import run_threads
from opt_distributed.comm import Axes, Comm, Roles
from opt_distributed.comm.threads import ThreadComm


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
