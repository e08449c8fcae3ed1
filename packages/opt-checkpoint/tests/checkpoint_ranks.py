"""Ranks for tests: gloo processes, and the same protocol carried out in one process, rank after rank."""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from processes import ByFile, run_processes

from opt_checkpoint.dcp.load_planner import DtypeRule, ShardedLoadPlanner
from opt_checkpoint.dcp.plan_cache import PlanCache
from opt_checkpoint.dcp.reader import CheckpointReader
from opt_checkpoint.dcp.save_planner import ShardedSavePlanner
from opt_checkpoint.dcp.strictness import StrictHandling
from opt_checkpoint.dcp.writer import CheckpointWriter
from opt_checkpoint.disk.detect import open_checkpoint


class RankPool:
    """Processes that take part in one world after another."""

    def run(self, size: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run `work(rank, size, *arguments)` on every rank of a new world; return the results by rank."""
        return run_processes(size, _with_rank, ByFile.of(work, *arguments))


def _with_rank(work: ByFile) -> Any:
    return work(dist.get_rank(), dist.get_world_size())


def _sent(message: Any) -> Any:
    """A message as another rank receives it."""
    return pickle.loads(pickle.dumps(message))


def save_as_ranks(
    states: Sequence[Any],
    path: Path,
    *,
    caches: Sequence[PlanCache] | None = None,
    **options: Any,
) -> None:
    """Carry out a save of as many ranks as there are states, one after another, in this process."""
    with_caches = caches or [PlanCache() for _ in states]
    planners = [ShardedSavePlanner(s, cache=c, **options) for s, c in zip(states, with_caches, strict=True)]
    writers = [CheckpointWriter(path, save_id=uuid.uuid4().hex) for _ in states]
    try:
        offers = [planner.offer(rank) for rank, planner in enumerate(planners)]
        for planner in planners:
            planner.accept(offers)
        local = [_sent(planner.create_local_plan()) for planner in planners]
        assigned, planned = planners[0].create_global_plan(local)
        messages = writers[0].begin(planned)
        results = []
        for writer, planner, own, message in zip(writers, planners, assigned, messages, strict=True):
            planner.finish_plan(_sent(own))
            results.append(_sent(writer.write_data(_sent(message), planner)))
        writers[0].finish(results)
    finally:
        writers[0].release()


def load_as_ranks(
    states: Sequence[Any], path: Path, *, strict: str = "raise_unexpected", dtype: str = "exact"
) -> list[Any]:
    """Carry out a load of as many ranks as there are states, in this process; what was assembled, by rank."""
    opened = open_checkpoint(path)
    options = {"strict": StrictHandling.parse(strict), "dtype": DtypeRule(dtype), "aliases": {}}
    planners = [ShardedLoadPlanner(state, opened.index, opened.common, **options) for state in states]
    unexpected = planners[0].unexpected_of([planner.create_local_plan() for planner in planners])
    assembled = []
    for planner in planners:
        planner.finish_plan(unexpected)
        CheckpointReader(opened.index, threads=1).read_data(planner)
        planner.assemble()
        assembled.append(planner.assembled)
    return assembled
