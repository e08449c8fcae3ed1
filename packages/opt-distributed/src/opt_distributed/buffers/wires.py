"""The table of wires: how the gradients of a buffer are summed over its replicas.

To add a wire, write it in a file of this folder, and a row here. The first row that applies is used.
"""

from collections.abc import Callable
from typing import NamedTuple

from opt_config import DistributedDataParallelConfig
from opt_distributed.buffers.wire import SumEverywhere, SumInFp32, SumToShards, Wire
from opt_distributed.comm.groups import Axes


class WireKind(NamedTuple):
    """A row of the table."""

    name: str
    make: Callable[[Axes], Wire]
    applies: Callable[[DistributedDataParallelConfig, int], bool]  # given the number of shards
    costs: str  # on the wire of each rank, and in memory
    problem: Callable[[DistributedDataParallelConfig], str] = lambda config: ""  # why it is refused; empty if it is not


WIRES = (
    WireKind(
        name="16 bits, summed in fp32",
        make=lambda axes: SumInFp32(axes.dp),
        applies=lambda config, num_shards: config.reduce_scatter_with_fp32_accumulation,
        costs="a bucket once; memory of a second bucket",
        problem=lambda config: (
            ""
            if config.use_distributed_optimizer
            else "reduce_scatter_with_fp32_accumulation=True needs use_distributed_optimizer=True: it sums to shards"
        ),
    ),
    WireKind(
        name="sum to shards",
        make=lambda axes: SumToShards(axes.dp, axes.inter),
        applies=lambda config, num_shards: num_shards > 1,
        costs="a bucket once; a shard twice with several instances",
    ),
    WireKind(
        name="sum on every rank",
        make=lambda axes: SumEverywhere(axes.dp, axes.inter),
        applies=lambda config, num_shards: True,
        costs="a bucket twice",
    ),
)


def wire_kind(config: DistributedDataParallelConfig, *, num_shards: int) -> WireKind:
    """Return the first wire that applies.

    Raises:
        ValueError: the configuration asks for a wire that it excludes.
    """
    kind = next(kind for kind in WIRES if kind.applies(config, num_shards))
    if problem := kind.problem(config):
        raise ValueError(problem)
    return kind
