"""What replicas must have in common before the first collective that one of them would miss."""

from collections.abc import Mapping
from typing import Any

from opt_config import DistributedDataParallelConfig
from opt_distributed.comm.groups import Axes, Roles
from opt_distributed.layout import LayoutError


def from_all_replicas(axes: Axes, value: Any) -> list[Any]:
    """Every replica's value, in the same order on every rank, instance by instance."""
    return [one for instance in axes.inter.gather_objects(axes.dp.gather_objects(value)) for one in instance]


def check_config(config: DistributedDataParallelConfig, roles: Roles, *, per_token: bool) -> None:
    """What a configuration says by itself, and what only the groups and the loss decide about it.

    Raises:
        ValueError: a field that does not go with the groups or with the loss.
    """
    config.validate()  # fields may have been assigned since it was built
    instances = roles.dense.inter.size
    if config.num_distributed_optimizer_instances != instances:
        raise ValueError(
            f"num_distributed_optimizer_instances={config.num_distributed_optimizer_instances}, but the groups make "
            f"{instances}; give the inter_dist_opt group of that size"
        )
    if config.reduce_scatter_with_fp32_accumulation and not config.use_distributed_optimizer:
        raise ValueError("reduce_scatter_with_fp32_accumulation=True needs use_distributed_optimizer=True")
    if config.average_in_collective and per_token:
        raise ValueError("average_in_collective=True takes means, calculate_per_token_loss sums; choose one")


def agree_on(axes: Axes, said: Mapping[str, str], error: ValueError | None) -> None:
    """Raises on every replica if one brings an error, or if what they say, by name, differs.

    Raises:
        LayoutError: another rank's error, or what differs, and on which ranks. This rank's own error as it is.
    """
    told = from_all_replicas(axes, (None if error is None else str(error), dict(said)))
    if error is not None:
        raise error
    for rank, (text, _) in enumerate(told):
        if text is not None:
            raise LayoutError(f"data-parallel rank {rank} refused: {text}")
    odd = [rank for rank, (_, theirs) in enumerate(told) if theirs != told[0][1]]
    if odd:
        raise LayoutError(
            f"data-parallel ranks {odd} laid their buffers out differently from rank 0; model and configuration must "
            f"be equal on all ranks that share parameters; {first_difference(told[0][1], told[odd[0]][1], rank=odd[0])}"
        )


def first_difference(first: Mapping[str, Any], other: Mapping[str, Any], *, rank: int) -> str:
    """What rank 0 and `rank` say otherwise, in words; they say something otherwise."""
    name = next(name for name in (*first, *other) if first.get(name) != other.get(name))
    return f"{name} is {first.get(name, 'missing')} on rank 0 and {other.get(name, 'missing')} on rank {rank}"
