"""A model with experts on a grid of ranks that are threads; its gradients have known norms and zeros."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from grids import Grid, thread_roles
from parity import Held
from torch import Tensor, nn

from opt_distributed import run_threads
from opt_distributed.comm import Alone, Axes, Comm, Roles


class Place(NamedTuple):
    """One rank's communicators in a grid."""

    tp: Comm
    dp: Comm
    expert_dp: Comm
    expert_tp: Comm
    experts: tuple[int, ...]  # of which this rank holds its part
    world: Comm
    inter: Comm = Alone()  # the same shard in other optimizer instances

    @property
    def roles(self) -> Roles:
        dense = Axes(dp=self.dp, tp=self.tp, inter=self.inter)
        expert = Axes(dp=self.expert_dp, tp=self.expert_tp, inter=self.inter)
        return Roles(dense=dense, expert=expert, everyone=self.world)


def run_grid(rank_main: Callable[[Place], Any], *, tp: int = 2, ep: int = 1, etp: int = 2, size: int = 4) -> list[Any]:
    """Run `rank_main(place)` on every rank."""
    grid = Grid(dp=size // tp, tp=tp, ep=ep, etp=etp)
    roles = thread_roles(grid, [])

    def start(world: Comm) -> Any:
        dense = roles[world.rank].dense
        expert = roles[world.rank].expert
        return rank_main(Place(dense.tp, dense.dp, expert.dp, expert.tp, (grid.place(world.rank).ep,), world))

    return run_threads(size, start)


def cut(whole: Tensor, rank: int, size: int, *, dim: int | None) -> Tensor:
    return whole.clone() if dim is None else whole.chunk(size, dim)[rank].contiguous()


# --- the model --------------------------------------------------------------------------------------------------------


class Shape(NamedTuple):
    size: tuple[int, ...]
    cut: int | None  # the dim that tensor parallelism cuts; None: every tensor-parallel rank has all of it


class Shapes(NamedTuple):
    """Of dense parameters, and of those of each expert."""

    dense: Mapping[str, Shape]
    expert: Mapping[str, Shape]


SMALL = Shapes(
    dense={"column": Shape((8, 6), 0), "row": Shape((6, 8), 1), "norm": Shape((5,), None)},
    expert={"up": Shape((8, 4), 0), "bias": Shape((7,), None)},
)


class Net(nn.Module):
    """This rank's part of the model; `forward` takes the gradients by name."""

    def __init__(self, place: Place, shapes: Shapes = SMALL, *, dtype: torch.dtype = torch.float32):
        super().__init__()
        for name, shape in shapes.dense.items():
            self.add_module(name, _held(shape, place.tp, dtype))
        for number in place.experts:
            for name, shape in shapes.expert.items():
                held = _held(shape, place.expert_tp, dtype)
                held.weight.allreduce = False
                self.add_module(f"{name}{number}", held)

    def forward(self, grads: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([module(grads[name]) for name, module in self.named_children()]).sum()


def _held(shape: Shape, tp: Comm, dtype: torch.dtype) -> Held:
    held = Held(shape.size, dtype, torch.Generator().manual_seed(1))
    held.weight = nn.Parameter(cut(held.weight.detach(), tp.rank, tp.size, dim=shape.cut))
    if shape.cut is not None and tp.size > 1:
        held.weight.tensor_model_parallel = True
        held.weight.partition_dim = shape.cut
    return held


def gradients(shapes: Mapping[str, Shape], seed: int) -> dict[str, Tensor]:
    """Whole gradients in 64ths, a fifth of them zero."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randint(-2, 3, shape.size, generator=generator) / 64 for name, shape in shapes.items()}


def parts(
    place: Place, seed: int = 0, shapes: Shapes = SMALL, *, replicas: tuple[int, int] | None = None
) -> dict[str, Tensor]:
    """This rank's local gradients, as the replicas of dense parameters and of experts given, by default its own."""
    of_dense, of_expert = replicas or (place.dp.rank, place.expert_dp.rank)
    found = {}
    for name, grad in gradients(shapes.dense, seed + of_dense).items():
        found[name] = cut(grad, place.tp.rank, place.tp.size, dim=shapes.dense[name].cut)
    tp = place.expert_tp
    for number in place.experts:
        for name, grad in gradients(shapes.expert, seed + 100 + 10 * number + of_expert).items():
            found[f"{name}{number}"] = cut(grad, tp.rank, tp.size, dim=shapes.expert[name].cut)
    return found


def mean_gradients(*, dp: int, ep: int, expert_dp: int, seed: int = 0, shapes: Shapes = SMALL) -> dict[str, Tensor]:
    """Of the whole model, in float64. An expert receives tokens of all dense replicas, so its gradient is a sum."""
    means = {
        name: sum(gradients(shapes.dense, seed + rank)[name].double() for rank in range(dp)) / dp
        for name in shapes.dense
    }
    for number in range(ep):
        first = seed + 100 + 10 * number
        of_replicas = [gradients(shapes.expert, one) for one in range(first, first + expert_dp)]
        for name in shapes.expert:
            means[f"{name}{number}"] = sum(grads[name].double() for grads in of_replicas) / dp
    return means
