"""Exceptions of any kind on one rank are the same error on all ranks, and no rank waits longer than its timeout."""

from __future__ import annotations

import errno
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_ranks import RankPool
from failing_calls import Calls, failing_at
from states import state_at

from opt_checkpoint import (
    AsyncSaver,
    CheckpointFailedError,
    CheckpointingException,
    ShardedTensor,
    ShardedTensorFactory,
    async_save,
    load,
    save,
    sharded_like,
)
from opt_checkpoint.dcp.load_planner import ShardedLoadPlanner
from opt_checkpoint.dcp.reader import CheckpointReader
from opt_checkpoint.dcp.save_planner import ShardedSavePlanner
from opt_checkpoint.dcp.writer import CheckpointWriter
from opt_checkpoint.run import save_load
from opt_checkpoint.run.staging import Staging


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


def interrupt(rank: int, size: int, folder: str, kind: str, where: str) -> None:
    """Rank 1 is interrupted; it gets the interrupt itself, and rank 0 an error, without waiting for a timeout."""
    stop: BaseException = {"ctrl-c": KeyboardInterrupt(), "exit": SystemExit(7)}[kind]

    def raise_it(*args: object, **options: object) -> None:
        raise stop

    save(state_at(1, rank, size), Path(folder) / "good")
    owner, name, act = {
        "planning a save": (ShardedSavePlanner, "offer", lambda: save(state_at(1, rank, size), Path(folder) / "x")),
        "writing": (CheckpointWriter, "write_data", lambda: save(state_at(1, rank, size), Path(folder) / "x")),
        "reading": (CheckpointReader, "read_data", lambda: _load_good(rank, size, folder)),
        "assembling": (ShardedLoadPlanner, "assemble", lambda: _load_good(rank, size, folder)),
        "a snapshot": (Staging, "snapshot", lambda: _save_async(rank, size, folder)),
        "opening": (save_load, "check_sizes", lambda: _load_good(rank, size, folder)),
    }[where]
    on = 0 if where == "opening" else 1
    original = getattr(owner, name)
    if rank == on:
        setattr(owner, name, raise_it)
    started = time.monotonic()
    try:
        with pytest.raises(type(stop) if rank == on else CheckpointFailedError) as caught:
            act()
    finally:
        setattr(owner, name, original)
    assert time.monotonic() - started < 20
    if rank == on:
        assert caught.value is stop
    else:
        assert f"rank {on}: {type(stop).__name__}" in str(caught.value)
    dist.barrier()
    assert sorted(path.name for path in Path(folder).iterdir()) == ["good"]


def _load_good(rank: int, size: int, folder: str) -> None:
    load(state_at(0, rank, size, filled=False), Path(folder) / "good")


def _save_async(rank: int, size: int, folder: str) -> None:
    async_save(state_at(1, rank, size), Path(folder) / "x").wait()


@pytest.mark.parametrize("kind", ["ctrl-c", "exit"])
@pytest.mark.parametrize("where", ["planning a save", "writing", "reading", "assembling", "a snapshot", "opening"])
def test_an_interrupt_is_itself_on_its_rank_and_an_error_on_others(
    ranks: RankPool, tmp_path: Path, kind: str, where: str
) -> None:
    ranks.run(2, interrupt, str(tmp_path), kind, where)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_of_a_process_alone_is_itself(tmp_path: Path, stop: type[BaseException]) -> None:
    def raise_it(name: str, key: str) -> None:
        raise stop

    with pytest.raises(stop), Calls(raise_it):
        save(state_at(1, 0, 1), tmp_path / "x")


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_failing_disk_is_an_os_error_and_not_a_value_error(tmp_path: Path, error: int) -> None:
    with pytest.raises(CheckpointFailedError) as caught, failing_at(4, error):
        save(state_at(1, 0, 1), tmp_path / "x")
    assert isinstance(caught.value, OSError)
    assert not isinstance(caught.value, ValueError)
    assert caught.value.errno == error
    assert str(caught.value).startswith(f"saving {tmp_path / 'x'} failed: OSError: [Errno {error}]")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.errno) == (str(caught.value), error)


def fill_a_disk(rank: int, size: int, folder: str) -> None:
    failing = failing_at(2 if rank else -1, errno.ENOSPC)
    with failing, pytest.raises(OSError, match=r"rank 1: OSError: \[Errno 28\]") as caught:
        save(state_at(1, rank, size), Path(folder) / "x")
    assert caught.value.errno == errno.ENOSPC
    assert isinstance(caught.value, CheckpointFailedError)


def test_a_full_disk_of_one_rank_is_an_os_error_on_all(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, fill_a_disk, str(tmp_path))


def test_bad_input_is_a_value_error_without_ranks_in_its_message(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^saving \S+ failed: ") as caught:
        save({"w": (sharded_like("w", torch.ones(2)),)}, tmp_path / "x")
    assert isinstance(caught.value, CheckpointingException)
    assert "rank 0" not in str(caught.value)
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), ValueError)
