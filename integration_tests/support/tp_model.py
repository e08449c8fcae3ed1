"""Ranks of a grid as threads, each with its communicators, and parameters that tensor parallelism cuts."""

from collections.abc import Callable
from typing import Any, NamedTuple

from grids import Grid, thread_roles
from torch import Tensor

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
    """Run `rank_main(place)` on every rank; ranks are threads."""
    grid = Grid(dp=size // tp, tp=tp, ep=ep, etp=etp)
    roles = thread_roles(grid, [])

    def start(world: Comm) -> Any:
        dense, expert = roles[world.rank].dense, roles[world.rank].expert
        return rank_main(Place(dense.tp, dense.dp, expert.dp, expert.tp, (grid.place(world.rank).ep,), world))

    return run_threads(size, start)


def cut(whole: Tensor, rank: int, size: int, *, dim: int | None) -> Tensor:
    return whole.clone() if dim is None else whole.chunk(size, dim)[rank].contiguous()
