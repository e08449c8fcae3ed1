"""Exceptions of any kind on one rank are the same error on all ranks, and no rank waits longer than its timeout."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_ranks import RankPool
from states import state_at

from opt_checkpoint import (
    AsyncSaver,
    CheckpointFailedError,
    ShardedTensor,
    ShardedTensorFactory,
    load,
    save,
    sharded_like,
)
from opt_checkpoint.dcp.save_planner import ShardedSavePlanner
from opt_checkpoint.dcp.writer import CheckpointWriter
from opt_checkpoint.run import save_load


class TwoArguments(Exception):
    """Pickles, and does not unpickle."""

    def __init__(self, what: str, number: int) -> None:
        super().__init__(f"{what} number {number}")


class HoldsALock(Exception):
    """Does not pickle."""

    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


class CannotBePrinted(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


CASES: dict[str, tuple[Any, str]] = {
    "two arguments": (lambda: TwoArguments("error", 2), "rank 1: TwoArguments: error number 2"),
    "a lock": (HoldsALock, "rank 1: HoldsALock: holds a lock"),
    "no text": (CannotBePrinted, r"rank 1: CannotBePrinted: \(its message cannot be printed\)"),
}


def fail_in_hooks(rank: int, size: int, folder: str, case: str) -> None:
    make, text = CASES[case]

    def raise_it(*args: object, **options: object) -> None:
        raise make()

    for owner, name in ((ShardedSavePlanner, "create_local_plan"), (CheckpointWriter, "write_data")):
        original = getattr(owner, name)
        if rank == 1:
            setattr(owner, name, raise_it)
        try:
            with pytest.raises(CheckpointFailedError, match=text) as caught:
                save(state_at(1, rank, size), Path(folder) / "x")
        finally:
            setattr(owner, name, original)
        assert any("On rank 1:" in note and "raise_it" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("case", CASES)
def test_an_exception_that_does_not_pickle_reaches_every_rank(ranks: RankPool, tmp_path: Path, case: str) -> None:
    ranks.run(2, fail_in_hooks, str(tmp_path), case)


def fail_outside_of_hooks(rank: int, size: int, folder: str, case: str) -> None:
    make, text = CASES[case]
    saver = AsyncSaver()

    class Broken(torch.Tensor):
        def detach(self) -> Any:
            raise make()

    state = state_at(1, rank, size)
    if rank == 1:
        state["b"].data = state["b"].data.as_subclass(Broken)
    with pytest.raises(CheckpointFailedError, match=text):
        saver.save(state, Path(folder) / "x")
    saver.close()
    save(state_at(1, rank, size), Path(folder) / "good")
    plain = save_load.check_sizes
    try:
        save_load.check_sizes = lambda index: (_ for _ in ()).throw(make())
        with pytest.raises(CheckpointFailedError, match=text.replace("rank 1", "rank 0")):
            load(state_at(0, rank, size, filled=False), Path(folder) / "good")
    finally:
        save_load.check_sizes = plain


@pytest.mark.parametrize("case", ["two arguments", "a lock"])
def test_so_does_one_that_is_raised_outside_of_planning(ranks: RankPool, tmp_path: Path, case: str) -> None:
    ranks.run(2, fail_outside_of_hooks, str(tmp_path), case)


def fail_to_merge(rank: int, size: int, folder: str) -> None:
    def build(key: str, data: torch.Tensor, replica_id: object, flat: object) -> list[ShardedTensor]:
        return [sharded_like(f"{key}.{half}", part) for half, part in enumerate(data.chunk(2))]

    def merge(parts: list[torch.Tensor]) -> torch.Tensor:
        if rank == 1 and merging:
            raise ZeroDivisionError("halves of nothing")
        return torch.cat(parts)

    merging: list[str] = []
    state = {f"w{rank}": ShardedTensorFactory(f"w{rank}", torch.ones(4), build, merge)}
    save(state, Path(folder) / "x")
    merging.append("yes")
    with pytest.raises(CheckpointFailedError, match=r"rank 1.*ZeroDivisionError.*halves of nothing"):
        load(state, Path(folder) / "x")


def test_a_merge_that_fails_on_one_rank_is_an_error_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, fail_to_merge, str(tmp_path))


def save_without_the_other(rank: int, size: int, folder: str) -> float:
    dist.barrier()  # making the group has the timeout too
    saver = AsyncSaver(timeout_s=3)
    started = time.monotonic()
    if rank == 0:
        with pytest.raises(CheckpointFailedError, match="a rank did not answer"):
            saver.save(state_at(1, rank, size), Path(folder) / "x")
    taken = time.monotonic() - started
    dist.barrier()
    return taken


def test_a_background_save_waits_for_an_absent_rank_until_its_timeout(ranks: RankPool, tmp_path: Path) -> None:
    taken = ranks.run(2, save_without_the_other, str(tmp_path))
    assert 2 < taken[0] < 50


def test_a_timeout_that_is_not_positive_is_refused() -> None:
    with pytest.raises(ValueError, match=r"timeout_s=0 must be positive"):
        AsyncSaver(timeout_s=0)
