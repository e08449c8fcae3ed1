"""Ranks as gloo processes, with a group for every axis of a grid."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import processes
import torch.distributed as dist

from fuzz.cases import Grid, Place
from fuzz.failed import Failed
from opt_distributed.comm import ProcessGroups

TIMEOUT = timedelta(seconds=processes.TIMEOUT_S)


def run_processes(size: int, rank_main: Callable[..., Any], *args: Any) -> list[Any]:
    """Return the result of `rank_main(*args)` on each of `size` ranks of a new world, `Failed` where it raised."""
    try:
        results = processes.run_processes(size, _or_failed, rank_main, args, reuse=True)
    except processes.RankError as error:
        return [Failed(kind="RankError", text=str(error), where="", is_consequence=False)] * size
    if any(isinstance(result, Failed) for result in results):  # a collective may still be under way
        processes.close_workers()
    return results


def _or_failed(rank_main: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        return rank_main(*args)
    except Exception as error:
        return Failed.of(error)


def process_groups(grid: Grid, rank: int) -> ProcessGroups:
    """The groups of a grid by Megatron-Core's roles. A group of one rank is None."""
    shards = grid.dp // grid.instances
    keys: dict[str, Callable[[Place], Any]] = {
        "dp": lambda p: (p.stage, p.tp, p.replica % grid.cp),
        "dp_cp": lambda p: (p.stage, p.tp),
        "cp": lambda p: (p.stage, p.tp, p.replica // grid.cp),
        "expt_dp": lambda p: (p.stage, p.ep, p.etp),
        "mp": lambda p: p.replica,
        "tp_ep_pp": lambda p: p.expert_replica,
        "tp": lambda p: (p.stage, p.replica),
        "expt_tp": lambda p: (p.stage, p.ep, p.expert_replica),
        "embd": lambda p: (p.tp, p.replica, "ends" if p.stage in (0, grid.pp - 1) else p.stage),
        "pp": lambda p: (p.tp, p.replica),
        "ep": lambda p: (p.stage, p.etp, p.expert_replica),
        "intra_dist_opt": lambda p: p.instance,
        "intra_dp_cp": lambda p: (p.stage, p.tp, p.instance),
        "intra_expt_dp": lambda p: (p.stage, p.ep, p.etp, p.instance),
        "inter_dist_opt": lambda p: (p.stage, p.tp, p.replica % shards),
    }
    return ProcessGroups(**{role: _group(grid, rank, key) for role, key in keys.items()})


def _group(grid: Grid, rank: int, key: Callable[[Place], Any]) -> dist.ProcessGroup | None:
    """Every rank makes all groups of the role, in one order."""
    by_key: dict[Any, list[int]] = {}
    for other, place in enumerate(grid.places()):
        by_key.setdefault(key(place), []).append(other)
    mine = None
    for members in by_key.values():
        group = dist.new_group(members, timeout=TIMEOUT) if len(members) > 1 else None
        if rank in members:
            mine = group
    return mine
