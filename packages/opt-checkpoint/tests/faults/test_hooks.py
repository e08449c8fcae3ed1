"""F1: an error in any hook, on any rank, reaches every rank with its cause; nothing is committed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from checkpoint_ranks import RankPool
from states import assert_is_step, state_at

from opt_checkpoint import CheckpointingException, load, save, verify_checkpoint
from opt_checkpoint.dcp.load_planner import ShardedLoadPlanner
from opt_checkpoint.dcp.reader import CheckpointReader
from opt_checkpoint.dcp.save_planner import ShardedSavePlanner
from opt_checkpoint.dcp.writer import CheckpointWriter

EVERY, COORDINATOR = (0, 1), (0,)
SAVE_HOOKS = [
    (ShardedSavePlanner, "offer", EVERY),
    (ShardedSavePlanner, "create_local_plan", EVERY),
    (ShardedSavePlanner, "create_global_plan", COORDINATOR),
    (ShardedSavePlanner, "finish_plan", EVERY),
    (ShardedSavePlanner, "objects", EVERY),
    (ShardedSavePlanner, "parts", EVERY),
    (CheckpointWriter, "begin", COORDINATOR),
    (CheckpointWriter, "write_data", EVERY),
    (CheckpointWriter, "finish", COORDINATOR),
]
LOAD_HOOKS = [
    (ShardedLoadPlanner, "create_local_plan", EVERY),
    (ShardedLoadPlanner, "unexpected_of", COORDINATOR),
    (ShardedLoadPlanner, "finish_plan", EVERY),
    (ShardedLoadPlanner, "resolve_tensor", EVERY),
    (ShardedLoadPlanner, "load_bytes", EVERY),
    (ShardedLoadPlanner, "assemble", EVERY),
    (CheckpointReader, "verify", EVERY),
    (CheckpointReader, "read_data", EVERY),
]


def fail_in_every_hook(rank: int, size: int, folder: str, hooks: list[Any], saving: bool) -> list[str]:
    """Break each hook on each rank in turn; what went wrong beyond what should."""
    problems, good = [], Path(folder) / "good"
    for owner, name, culprits in hooks:
        for culprit in culprits:
            original = getattr(owner, name)

            def broken(*args: Any, _at: int = culprit, _do: Any = original, _as: str = name, **more: Any) -> Any:
                if rank == _at:
                    raise RuntimeError(f"broken {_as} on {_at}")
                return _do(*args, **more)

            setattr(owner, name, broken)
            started, target = time.monotonic(), Path(folder) / f"{owner.__name__}-{name}-{culprit}"
            try:
                if saving:
                    save(state_at(2, rank, size), target)
                else:
                    load(state_at(0, rank, size, filled=False), good)
                problems.append(f"{name} on {culprit}: no error on rank {rank}")
            except CheckpointingException as error:
                if f"broken {name} on {culprit}" not in str(error) or time.monotonic() - started > 30:
                    problems.append(f"{name} on {culprit}: rank {rank} got {error!r}")
            finally:
                setattr(owner, name, original)
            dist.barrier()
            if target.exists():
                problems.append(f"{name} on {culprit}: committed")
    leftovers = [p.name for p in Path(folder).iterdir() if p.name != "good"]
    report = load(state_at(0, rank, size, filled=False), good)
    assert_is_step(report.state, 1, rank, size)
    return problems + leftovers


def save_good(rank: int, size: int, folder: str) -> None:
    save(state_at(1, rank, size), Path(folder) / "good")


@pytest.mark.parametrize(("hooks", "saving"), [(SAVE_HOOKS, True), (LOAD_HOOKS, False)], ids=["save", "load"])
def test_an_error_in_any_hook_reaches_every_rank(ranks: RankPool, tmp_path: Path, hooks: Any, saving: bool) -> None:
    ranks.run(2, save_good, str(tmp_path))
    assert ranks.run(2, fail_in_every_hook, str(tmp_path), hooks, saving) == [[], []]
    assert verify_checkpoint(tmp_path / "good") == []
