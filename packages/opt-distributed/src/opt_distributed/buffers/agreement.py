"""What replicas must have in common before the first collective that one of them would miss."""

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


def agree_on(axes: Axes, fingerprint: str, error: ValueError | None) -> None:
    """Raises on every replica if one brings an error, or if their fingerprints differ.

    Raises:
        LayoutError: another rank's error, or the ranks that differ from the first. This rank's own error as it is.
    """
    told = from_all_replicas(axes, (None if error is None else str(error), fingerprint))
    if error is not None:
        raise error
    for rank, (text, _) in enumerate(told):
        if text is not None:
            raise LayoutError(f"data-parallel rank {rank} refused: {text}")
    odd = [rank for rank, (_, print_) in enumerate(told) if print_ != told[0][1]]
    if odd:
        raise LayoutError(
            f"data-parallel ranks {odd} laid their buffers out differently from rank 0; model and configuration must "
            "be equal on all ranks that share parameters"
        )
