"""Checks that replicas have equal layouts and configurations, before their first collective on buffers."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from opt_config import DistributedDataParallelConfig
from opt_distributed.comm.collectives import Comm
from opt_distributed.comm.groups import Axes, Roles
from opt_distributed.layout import LayoutError


def from_all_replicas(axes: Axes, value: Any) -> list[Any]:
    """Gather the values of all replicas, in the same order on every rank, instance by instance."""
    return [one for instance in axes.inter.gather_objects(axes.dp.gather_objects(value)) for one in instance]


def check_config(config: DistributedDataParallelConfig, roles: Roles, *, per_token: bool) -> None:
    """Check a configuration alone, and against the process groups and the kind of loss.

    Raises:
        ValueError: a field contradicts another one, the groups, or the loss.
    """
    config.validate()  # fields may have been assigned since it was built
    instances = roles.dense.inter.size
    if config.num_distributed_optimizer_instances != instances:
        raise ValueError(
            f"num_distributed_optimizer_instances={config.num_distributed_optimizer_instances}, but the groups make up "
            f"{instances}; pass an inter_dist_opt group of that size"
        )
    if config.reduce_scatter_with_fp32_accumulation and not config.use_distributed_optimizer:
        raise ValueError("reduce_scatter_with_fp32_accumulation=True needs use_distributed_optimizer=True")
    if config.average_in_collective and per_token:
        raise ValueError(
            "average_in_collective=True averages, calculate_per_token_loss=True sums; set one of them to False"
        )


class Facts(NamedTuple):
    """Values that must be equal on all replicas of one family of parameters."""

    axes: Axes
    by_name: Mapping[str, str]


class _Report(NamedTuple):
    """What one rank reports to the others."""

    error: str | None  # of this rank
    forwarded: str | None  # the refusal of another family's replicas
    by_name: Mapping[str, str]


def agree_on(facts: Sequence[Facts], error: Exception | None, *, peers: Sequence[Comm] = ()) -> None:
    """Raise on all ranks that are connected through `facts` or `peers` if one of them has an error, or facts differ.

    Every rank forwards refusals before it raises, so that no rank waits for one that has raised.

    Raises:
        LayoutError: quotes the error of another rank, or says what differs on which ranks. If this rank has an error,
            that is raised instead.
    """
    own = None if error is None else str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    refusal: str | None = None
    for axes, by_name in facts:
        reports = from_all_replicas(axes, _Report(own, refusal, dict(by_name)))
        refusal = refusal or _refusal(reports)
    for comm in peers:
        refusals = comm.gather_objects(refusal)
        refusal = refusal or next((one for one in refusals if one is not None), None)
    if error is not None:
        raise error
    if refusal is not None:
        raise LayoutError(refusal)


def _refusal(reports: Sequence[_Report]) -> str | None:
    for rank, report in enumerate(reports):
        if report.error is not None:
            return f"data-parallel rank {rank} refused: {report.error}"
    forwarded = next((report.forwarded for report in reports if report.forwarded is not None), None)
    if forwarded is not None:
        return forwarded
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
