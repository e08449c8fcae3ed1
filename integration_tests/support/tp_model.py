"""Grids of tensor- and data-parallel ranks as threads, and parameters that tensor parallelism cuts."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from opt_distributed import run_threads
from opt_distributed.comm import Axes, Comm, Roles
from opt_distributed.comm.threads import ThreadComm, World


class Grid(NamedTuple):
    """One rank's communicators; rank = dp * tp.size + tp, as Megatron-Core orders them."""

    tp: Comm
    dp: Comm
    world: Comm

    @property
    def roles(self) -> Roles:
        dense = Axes(dp=self.dp, tp=self.tp)
        return Roles(dense=dense, expert=dense, everyone=self.world)


def run_grid(rank_main: Callable[[Grid], Any], *, tp: int = 2, dp: int = 2) -> list[Any]:
    """Run `rank_main(grid)` on every rank; ranks are threads."""
    tps = comms_of([list(range(first, first + tp)) for first in range(0, tp * dp, tp)])
    dps = comms_of([list(range(first, tp * dp, tp)) for first in range(tp)])
    return run_threads(tp * dp, lambda world: rank_main(Grid(tps[world.rank], dps[world.rank], world)))


def cut(whole: Tensor, rank: int, size: int, *, dim: int | None) -> Tensor:
    return whole.clone() if dim is None else whole.chunk(size, dim)[rank].contiguous()


def comms_of(grid: list[list[int]]) -> dict[int, ThreadComm]:
    """Each rank's communicator in the groups of `grid`, which hold every rank once."""
    worlds = [(group, World(len(group)).comms()) for group in grid]
    return {rank: comm for group, comms in worlds for rank, comm in zip(group, comms, strict=True)}
