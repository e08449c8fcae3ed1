"""Grids of tensor- and data-parallel ranks as threads, and parameters that tensor parallelism cuts."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from opt_checkpoint import ShardedTensor
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


class Part(nn.Module):
    """This rank's part of one parameter. `dim`: what tensor parallelism cuts, None for nothing."""

    def __init__(self, whole: Tensor, tp: Comm, *, dim: int | None):
        super().__init__()
        self.dim, self.tp = dim, tp
        self.weight = nn.Parameter(cut(whole, tp.rank, tp.size, dim=dim))
        if dim is not None and tp.size > 1:
            self.weight.tensor_model_parallel, self.weight.partition_dim = True, dim

    def sharded(self, key: str) -> ShardedTensor:
        """The parameter as Megatron-Core's model describes it."""
        offsets = [] if self.dim is None else [(self.dim, self.tp.rank, self.tp.size)]
        replica = (0, self.tp.rank if self.dim is None else 0, 0)
        return ShardedTensor.from_rank_offsets(key, self.weight, *offsets, replica_id=replica)


def cut(whole: Tensor, rank: int, size: int, *, dim: int | None) -> Tensor:
    return whole.clone() if dim is None else whole.chunk(size, dim)[rank].contiguous()


def comms_of(grid: list[list[int]]) -> dict[int, ThreadComm]:
    """Each rank's communicator in the groups of `grid`, which hold every rank once."""
    worlds = [(group, World(len(group)).comms()) for group in grid]
    return {rank: comm for group, comms in worlds for rank, comm in zip(group, comms, strict=True)}
