"""Exceptions of any kind on one rank are the same error on all ranks, and no rank waits longer than its timeout."""

from __future__ import annotations

import errno
import pickle
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_ranks import RankPool, on_threads, save_as_ranks
from failing_calls import Calls, failing_at
from states import state_at

from opt_checkpoint import (
    AsyncSaver,
    CheckpointFailedError,
    CheckpointingException,
    ShardedTensor,
    ShardedTensorFactory,
    load,
    save,
    sharded_like,
)


def fail_to_copy(rank: int, size: int, folder: str) -> None:
    """A snapshot fails on rank 1, with an error or an interrupt."""
    saver = AsyncSaver()
    for error in (ZeroDivisionError("no copy"), KeyboardInterrupt()):

        class Broken(torch.Tensor):
            def detach(self, error: BaseException = error) -> Any:
                raise error

        state = state_at(1, rank, size)
        if rank == 1:
            state["b"].data = state["b"].data.as_subclass(Broken)
        is_own = rank == 1 and isinstance(error, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt if is_own else CheckpointFailedError) as caught:
            saver.save(state, Path(folder) / "x")
        assert is_own or f"rank 1: {type(error).__name__}: {error}" in str(caught.value)
    saver.close()


def test_a_snapshot_that_fails_on_one_rank_is_an_error_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, fail_to_copy, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_merge_that_fails_on_one_rank_is_an_error_on_every_rank(tmp_path: Path) -> None:
    def build(key: str, data: torch.Tensor, replica_id: object, flat: object) -> list[ShardedTensor]:
        return [sharded_like(f"{key}.{half}", part) for half, part in enumerate(data.chunk(2))]

    def merge(parts: list[torch.Tensor]) -> torch.Tensor:
        raise ZeroDivisionError("halves of nothing")

    states = [{f"w{r}": ShardedTensorFactory(f"w{r}", torch.ones(4), build, merge if r else torch.cat)} for r in (0, 1)]
    save_as_ranks(states, tmp_path / "x")
    results = on_threads(2, lambda ranks: load(states[ranks.rank], tmp_path / "x", process_group=ranks))
    for error in results:
        assert re.search(r"rank 1.*ZeroDivisionError.*halves of nothing", str(error))


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


def test_bad_input_is_a_value_error_without_ranks_in_its_message(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^saving \S+ failed: ") as caught:
        save({"w": (sharded_like("w", torch.ones(2)),)}, tmp_path / "x")
    assert isinstance(caught.value, CheckpointingException)
    assert "rank 0" not in str(caught.value)
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), ValueError)
