"""Faults of the local tier: full disks, a kill during replication, damaged names."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_ranks import RankPool
from processes import new_meeting, start
from states import state_at

from opt_checkpoint import (
    CheckpointCorruptError,
    CheckpointFailedError,
    CheckpointNotFoundError,
    Resume,
)
from opt_checkpoint.disk.data_file import FILE_MARK
from opt_checkpoint.run.series import step_name

sys.path.insert(0, str(Path(__file__).parent))

from failing_calls import Calls, failing
from killed_ranks import save_tiers_and_die
from local_tiers import damage, parts_of, resume, resumed, save_steps, tiers


def test_where_a_part_and_its_copy_are_damaged_an_older_step_is_taken(tmp_path: Path, ranks: RankPool) -> None:
    ranks.run(2, save_steps, str(tmp_path), [1, 2], {"keep_local": 2})
    for node in (0, 1):
        damage(parts_of(tmp_path, node, 2)[0])
    found = resumed(ranks, 2, tmp_path)
    assert found is not None
    assert (found.step, found.holders) == (1, (0, 1))
    assert any("the parts of ranks [0] are on no node" in reason for reason in found.passed_over)


def test_a_damaged_durable_tier_does_not_stop_a_whole_local_one(tmp_path: Path, ranks: RankPool) -> None:
    ranks.run(2, save_steps, str(tmp_path), [1], {"durable_every": 1})
    (tmp_path / "durable" / step_name(1) / "__0_0.distcp").unlink()
    found = resumed(ranks, 2, tmp_path)
    assert found is not None
    assert found.tier == "local"
    for node in (0, 1):
        shutil.rmtree(tmp_path / f"node-{node}")
    ranks.run(2, find_nothing_whole, str(tmp_path))


def find_nothing_whole(rank: int, size: int, folder: str) -> None:
    with pytest.raises(CheckpointCorruptError, match="every checkpoint"):
        tiers(folder, rank).find()


def damage_a_copy_on_its_way(rank: int, size: int, folder: str) -> None:
    """Rank 1's part is damaged after it was written, or between the nodes: the copy must not count."""

    send, sent = torch.distributed.isend, []

    def flip(chunk: torch.Tensor, *args: object, **options: object) -> object:
        if bytes(chunk[: len(FILE_MARK)].tolist()) == FILE_MARK:  # not the manifest, which has a checksum of its own
            sent.append(chunk.numel())
            chunk[chunk.numel() // 2] ^= 4
        return send(chunk, *args, **options)

    manager = tiers(folder, rank)
    manager.save(1, state_at(1, rank, size))
    manager.wait()
    if rank == 1:
        torch.distributed.isend = flip
    try:
        manager.save(2, state_at(2, rank, size))
        with pytest.raises(CheckpointCorruptError, match="on rank 1 is damaged"):
            manager.wait()
    finally:
        torch.distributed.isend = send
    assert bool(sent) == (rank == 1)
    manager.close()
    torch.distributed.barrier()


def test_a_copied_part_is_checked_on_receipt(tmp_path: Path, ranks: RankPool) -> None:
    ranks.run(2, damage_a_copy_on_its_way, str(tmp_path))
    assert [part.name for part in parts_of(tmp_path, 0, 2)] == ["rank-00000"]


def fill_a_disk(rank: int, size: int, folder: str) -> None:
    manager = tiers(folder, rank)
    manager.save(1, state_at(1, rank, size))
    manager.wait()
    full = failing(1000 * rank, lambda name, key: name == "write" and "tmp-" in key, 28)  # no room for a copy
    with Calls(full):
        manager.save(2, state_at(2, rank, size))
        with pytest.raises(CheckpointFailedError, match="No space left") as caught:
            manager.wait()
    assert caught.value.causes[1].errno == 28  # type: ignore[attr-defined]
    found = manager.find()
    assert found is not None
    assert found.step == 1
    manager.save(3, state_at(3, rank, size))  # the next one goes on
    manager.close()


def test_a_full_disk_is_an_error_on_every_rank_and_the_step_before_stays(tmp_path: Path, ranks: RankPool) -> None:
    ranks.run(2, fill_a_disk, str(tmp_path))
    assert resumed(ranks, 2, tmp_path) == Resume(3, "local", (0, 1), ())


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_in_the_middle_of_replication_the_step_before_is_resumed(
    tmp_path: Path, ranks: RankPool, victim: int
) -> None:
    """One rank dies while it writes the other's copy of step 2; the other one's copy may have arrived."""
    meeting = new_meeting(tmp_path)
    jobs = [start(save_tiers_and_die, rank, 2, meeting, str(tmp_path), victim) for rank in (0, 1)]
    for job in jobs:
        job.join(90)
    assert jobs[victim].exitcode == -signal.SIGKILL
    assert jobs[1 - victim].exitcode == 3  # an error that names the other rank's silence
    found = resumed(ranks, 2, tmp_path)
    assert found is not None
    assert found.step == 2  # both had written their own parts
    shutil.rmtree(tmp_path / f"node-{victim}")
    found = resumed(ranks, 2, tmp_path)
    assert found is not None
    assert (found.step, found.tier) in {(2, "local"), (1, "local")}
    ranks.run(2, save_steps, str(tmp_path), [3], {})
    assert resumed(ranks, 2, tmp_path) == Resume(3, "local", (0, 1), ())


def test_a_process_alone_resumes_from_the_local_tier(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="survives the loss of processes, not of the node"):
        manager = tiers(str(tmp_path), 0, durable_every=2)
    assert manager.find() is None
    with pytest.raises(CheckpointNotFoundError):
        manager.load({})
    assert [manager.save(step, state_at(step, 0, 1)) for step in (1, 2, 3)] == [False, True, False]
    manager.close()
    with pytest.warns(UserWarning, match="one node"):
        assert resume(0, 1, str(tmp_path), {}) == Resume(3, "local", (0,), ())


def test_a_reader_of_a_new_place_writes_nothing(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="one node"):
        assert tiers(str(tmp_path / "x"), 0).find() is None
    assert not (tmp_path / "x").exists()


BAD_RUNS: dict[str, bytes] = {
    "empty": b"",
    "another file": b"[]",
    "a way out": json.dumps({"run": "../other"}).encode(),
    "no text": json.dumps({"run": 3}).encode(),
}


@pytest.mark.parametrize("case", BAD_RUNS)
def test_a_damaged_name_of_the_run_is_an_error(tmp_path: Path, case: str) -> None:
    (tmp_path / "durable").mkdir()
    (tmp_path / "durable" / "run.json").write_bytes(BAD_RUNS[case])
    with pytest.warns(UserWarning, match="one node"):
        manager = tiers(str(tmp_path), 0)
    for call in (manager.find, lambda: manager.save(1, {"step": 1})):
        with pytest.raises(CheckpointCorruptError, match=r"run\.json is damaged"):
            call()


@pytest.mark.parametrize("name", ["durable_every", "keep_local"])
def test_numbers_below_one_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=0"):
        tiers(str(tmp_path), 0, **{name: 0})
