"""Ranks for tests: real processes over gloo, and the same protocol carried out in one process, rank after rank."""

from __future__ import annotations

import importlib.util
import inspect
import multiprocessing as mp
import os
import pickle
import sys
import tempfile
import traceback
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from opt_checkpoint.dcp.load_planner import DtypeRule, ShardedLoadPlanner
from opt_checkpoint.dcp.plan_cache import PlanCache
from opt_checkpoint.dcp.reader import CheckpointReader
from opt_checkpoint.dcp.save_planner import ShardedSavePlanner
from opt_checkpoint.dcp.strictness import StrictHandling
from opt_checkpoint.dcp.writer import CheckpointWriter
from opt_checkpoint.disk.detect import open_checkpoint
from opt_checkpoint.disk.files import Files
from opt_checkpoint.run.ranks import leave

TIMEOUT = timedelta(seconds=60)
NO_ANSWER = "no answer"


def fork_server() -> Any:
    """A context whose processes are forked from one that has imported torch, and has run no threads.

    A spawned process would import torch and torch's checkpoints again: two seconds each.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.checkpoint", "opt_checkpoint", "killed_ranks"])
    return context


def new_meeting(folder: Path) -> str:
    """A new file in which the ranks of a world find each other.

    No port: on torch 2.6 a rank that knocks before rank 0 listens may wait for half a minute before it tries again.
    """
    return str(folder / f"world-{uuid.uuid4().hex}")


def join_world(rank: int, size: int, meeting: str, timeout: timedelta = TIMEOUT) -> None:
    """Make this process a rank of a gloo world."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=timeout)


def function_at(file: str, name: str) -> Callable[..., Any]:
    """A function of a test file, which a worker cannot import by name."""
    spec = importlib.util.spec_from_file_location(f"work_{abs(hash(file))}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    work: Callable[..., Any] = getattr(module, name)
    return work


def _serve(pipe: Connection) -> None:
    """Run tasks until stopped, each in a separate world."""
    os.environ["OMP_NUM_THREADS"] = "1"
    while (task := pipe.recv()) is not None:
        file, name, rank, size, meeting, arguments = task
        try:
            work = function_at(file, name)
            join_world(rank, size, meeting)
            pipe.send((True, work(rank, size, *arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        finally:
            if dist.is_initialized():
                leave(dist.group.WORLD)


class RankPool:
    """Up to four processes that take part in one world after another."""

    def __init__(self) -> None:
        self._context = fork_server()
        self._workers: list[tuple[Any, Connection]] = []
        self._folder = tempfile.TemporaryDirectory()

    def run(self, size: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`work(rank, size, *arguments)` on every rank of a new world; the results by rank."""
        while len(self._workers) < size:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self._workers.append((process, ours))
        meeting = new_meeting(Path(self._folder.name))
        for rank, (_, pipe) in enumerate(self._workers[:size]):
            pipe.send((inspect.getsourcefile(work), work.__name__, rank, size, meeting, arguments))
        answers = [pipe.recv() if pipe.poll(120) else (False, NO_ANSWER) for _, pipe in self._workers[:size]]
        if (False, NO_ANSWER) in answers:  # a late answer would be taken for that of the next test
            self._kill()
        failed = [f"rank {rank}:\n{answer}" for rank, (fine, answer) in enumerate(answers) if not fine]
        assert not failed, "\n".join(failed)
        return [answer for _, answer in answers]

    def close(self) -> None:
        """End the processes."""
        for process, pipe in self._workers:
            pipe.send(None)
            process.join(5)
        self._folder.cleanup()

    def _kill(self) -> None:
        for process, pipe in self._workers:
            process.kill()
            pipe.close()
        self._workers.clear()


def _sent(message: Any) -> Any:
    """A message as another rank receives it."""
    return pickle.loads(pickle.dumps(message))


def save_as_ranks(
    states: Sequence[Any],
    path: Path,
    *,
    files: Files | None = None,
    caches: Sequence[PlanCache] | None = None,
    **options: Any,
) -> None:
    """Carry out a save of as many ranks as there are states, one after another, in this process."""
    with_caches = caches or [PlanCache() for _ in states]
    planners = [ShardedSavePlanner(s, cache=c, **options) for s, c in zip(states, with_caches, strict=True)]
    writers = [CheckpointWriter(path, save_id=uuid.uuid4().hex, files=files) for _ in states]
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
