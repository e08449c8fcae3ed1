"""What replicas must have in common before the first collective that one of them would miss."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from opt_config import DistributedDataParallelConfig
from opt_distributed.comm.collectives import Comm
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


class Facts(NamedTuple):
    """What must be equal on all replicas of one family of parameters."""

    axes: Axes
    by_name: Mapping[str, str]


class _Report(NamedTuple):
    """One rank's part in a verdict."""

    error: str | None  # this rank's own
    heard: str | None  # what another family's replicas refused
    by_name: Mapping[str, str]


def agree_on(facts: Sequence[Facts], error: Exception | None, *, peers: Sequence[Comm] = ()) -> None:
    """Raises on every rank that is connected through `facts` or `peers` if any of them has an error, or facts differ.

    Every rank passes on what it heard before it raises, so that no rank waits for one that has raised.

    Raises:
        LayoutError: another rank's error, or what differs, and on which ranks. This rank raises its own error.
    """
    own = None if error is None else str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    heard: str | None = None
    for axes, by_name in facts:
        reports = from_all_replicas(axes, _Report(own, heard, dict(by_name)))
        heard = heard or _refusal(reports)
    for comm in peers:
        refusals = comm.gather_objects(heard)
        heard = heard or next((refusal for refusal in refusals if refusal is not None), None)
    if error is not None:
        raise error
    if heard is not None:
        raise LayoutError(heard)


def _refusal(reports: Sequence[_Report]) -> str | None:
    for rank, report in enumerate(reports):
        if report.error is not None:
            return f"data-parallel rank {rank} refused: {report.error}"
    heard = next((report.heard for report in reports if report.heard is not None), None)
    if heard is not None:
        return heard
    first = reports[0].by_name
    different = [rank for rank, report in enumerate(reports) if report.by_name != first]
    if not different:
        return None
    difference = first_difference(first, reports[different[0]].by_name, rank=different[0])
    return (
        f"data-parallel ranks {different} laid their buffers out differently from rank 0; model and configuration must "
        f"be equal on all ranks that share parameters; {difference}"
    )


def first_difference(first: Mapping[str, Any], other: Mapping[str, Any], *, rank: int) -> str:
    """Describe the first entry in which the facts of rank 0 and of `rank` differ; they must differ."""
    name = next(name for name in (*first, *other) if first.get(name) != other.get(name))
    return f"{name} is {first.get(name, 'missing')} on rank 0 and {other.get(name, 'missing')} on rank {rank}"
