"""Two tiers: nodes that are lost, copies that are damaged, steps that are half replicated, and runs that are others."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_ranks import RankPool, fork_server, new_meeting
from states import assert_is_step, state_at

from opt_checkpoint import (
    CheckpointCorruptError,
    CheckpointFailedError,
    CheckpointManager,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    Resume,
    TieredCheckpointManager,
    sharded_like,
    sharded_model,
    sharded_optimizer,
    verify_checkpoint,
)
from opt_checkpoint.run.local_tier import UnsyncedFiles
from opt_checkpoint.run.manager import step_name

sys.path.insert(0, str(Path(__file__).parent))

from killed_ranks import save_tiers_and_die


def tiers(folder: str, rank: int, *, per_node: int = 1, **options: Any) -> TieredCheckpointManager:
    """A manager on a simulated node with a directory of its own."""
    node = f"node-{rank // per_node}"
    options = {"durable_every": 100, **options}
    return TieredCheckpointManager(f"{folder}/{node}", f"{folder}/durable", node=node, **options)


def save_steps(rank: int, size: int, folder: str, steps: list[int], options: dict[str, Any]) -> list[bool]:
    """Save steps in one go."""
    with tiers(folder, rank, **options) as manager:
        saved = [manager.save(step, state_at(step, rank, size)) for step in steps]
    return saved


def resume(rank: int, size: int, folder: str, options: dict[str, Any]) -> Resume | None:
    """Resume, and check that what is loaded is the step that was found."""
    with tiers(folder, rank, **options) as manager:
        found = manager.find()
        if found is not None:
            report = manager.load(state_at(0, rank, size, filled=False))
            assert_is_step(report.state, found.step, rank, size)
            assert report.missing == report.unexpected == ()
        return found


def resumed(ranks: RankPool, size: int, folder: Path, **options: Any) -> Resume | None:
    """What all ranks of a new world resume from, which is the same on each."""
    found = ranks.run(size, resume, str(folder), options)
    assert all(one == found[0] for one in found)
    return found[0]


def parts_of(folder: Path, node: int, step: int) -> list[Path]:
    """The parts of a step on a node, by rank."""
    return sorted((folder / f"node-{node}").glob(f"*/{step_name(step)}/rank-*"))


def damage(part: Path) -> None:
    """Change a bit in the middle of a part's data."""
    file = part / "__0_0.distcp"
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)


def test_every_rank_resumes_from_its_own_part_and_its_copy_is_on_another_node(tmp_path: Path, ranks: RankPool) -> None:
    options = {"per_node": 2, "durable_every": 20, "keep_local": 2}
    assert ranks.run(4, save_steps, str(tmp_path), [10, 20, 30], options) == [[False, True, False]] * 4
    for node, owners in ((0, range(4)), (1, range(4))):
        for step in (20, 30):
            assert [part.name for part in parts_of(tmp_path, node, step)] == [f"rank-{o:05d}" for o in owners]
            assert all(verify_checkpoint(part) == [] for part in parts_of(tmp_path, node, step))
        assert parts_of(tmp_path, node, 10) == []
    assert resumed(ranks, 4, tmp_path, **options) == Resume(30, "local", (0, 1, 2, 3), ())


def test_after_any_one_node_is_lost_the_newest_step_is_resumed_from_copies(tmp_path: Path, ranks: RankPool) -> None:
    for lost in range(3):
        folder = tmp_path / str(lost)
        ranks.run(3, save_steps, str(folder), [1, 2], {})
        shutil.rmtree(folder / f"node-{lost}")
        holders = tuple((rank + 1) % 3 if rank == lost else rank for rank in range(3))
        assert resumed(ranks, 3, folder) == Resume(2, "local", holders, ())
        assert resumed(ranks, 3, folder) == Resume(2, "local", (0, 1, 2), ())  # the fetched part stays


def test_where_two_nodes_are_lost_the_durable_tier_is_taken_and_the_reason_is_given(
    tmp_path: Path, ranks: RankPool
) -> None:
    ranks.run(3, save_steps, str(tmp_path), [1, 2, 3], {"durable_every": 2})
    shutil.rmtree(tmp_path / "node-0")
    shutil.rmtree(tmp_path / "node-1")
    found = resumed(ranks, 3, tmp_path)
    assert found == Resume(2, "durable", (), ("step 3 of the local tier: the parts of ranks [0] are on no node",))


def test_a_damaged_part_is_replaced_by_its_copy(tmp_path: Path, ranks: RankPool) -> None:
    ranks.run(2, save_steps, str(tmp_path), [1], {})
    own = parts_of(tmp_path, 0, 1)[0]
    damage(own)
    found = resumed(ranks, 2, tmp_path)
    assert found is not None
    assert (found.step, found.tier, found.holders) == (1, "local", (1, 1))
    (reason,) = found.passed_over
    assert "rank 0's part" in reason
    assert "__0_0.distcp" in reason
    assert verify_checkpoint(own) == []
    (own / "manifest.bin").write_bytes(b"nothing")
    assert resumed(ranks, 2, tmp_path) == Resume(1, "local", (1, 1), ())
    (own / "__0_0.distcp").unlink()
    assert resumed(ranks, 2, tmp_path) == Resume(1, "local", (1, 1), ())


def test_where_a_part_and_its_copy_are_damaged_an_older_step_is_taken(tmp_path: Path, ranks: RankPool) -> None:
    ranks.run(2, save_steps, str(tmp_path), [1, 2], {"keep_local": 2})
    for node in (0, 1):
        damage(parts_of(tmp_path, node, 2)[0])
    found = resumed(ranks, 2, tmp_path)
    assert found is not None
    assert (found.step, found.holders) == (1, (0, 1))
    assert any("the parts of ranks [0] are on no node" in reason for reason in found.passed_over)


def test_the_newer_of_two_tiers_is_taken(tmp_path: Path, ranks: RankPool) -> None:
    ranks.run(2, save_steps, str(tmp_path), [10], {"durable_every": 10})
    assert resumed(ranks, 2, tmp_path) == Resume(10, "local", (0, 1), ())  # of equal steps the local one
    ranks.run(2, save_durably, str(tmp_path), 15)
    assert resumed(ranks, 2, tmp_path) == Resume(15, "durable", (), ())
    ranks.run(2, save_steps, str(tmp_path), [20], {})
    assert resumed(ranks, 2, tmp_path) == Resume(20, "local", (0, 1), ())


def save_durably(rank: int, size: int, folder: str, step: int) -> None:
    with CheckpointManager(f"{folder}/durable") as manager:
        manager.save(step, state_at(step, rank, size))


def test_a_damaged_durable_tier_does_not_stop_a_whole_local_one(tmp_path: Path, ranks: RankPool) -> None:
    ranks.run(2, save_steps, str(tmp_path), [1], {"durable_every": 1})
    (tmp_path / "durable" / step_name(1) / "__0_0.distcp").unlink()
    found = resumed(ranks, 2, tmp_path)
    assert found is not None
    assert found.tier == "local"
    assert "is damaged" in found.passed_over[0]
    for node in (0, 1):
        shutil.rmtree(tmp_path / f"node-{node}")
    ranks.run(2, find_nothing_whole, str(tmp_path))


def find_nothing_whole(rank: int, size: int, folder: str) -> None:
    with pytest.raises(CheckpointCorruptError, match="every checkpoint"):
        tiers(folder, rank).find()


def test_parts_of_another_run_are_never_taken(tmp_path: Path, ranks: RankPool) -> None:
    ranks.run(2, save_steps, str(tmp_path), [5], {})
    shutil.rmtree(tmp_path / "durable")
    assert resumed(ranks, 2, tmp_path) is None  # a new run has no name yet
    ranks.run(2, save_steps, str(tmp_path), [1], {})
    assert resumed(ranks, 2, tmp_path) == Resume(1, "local", (0, 1), ())
    # Parts of the old run under the new run's name are recognised by what is written in them.
    (new,) = {part.parent.parent for part in parts_of(tmp_path, 0, 1)}
    for node in (0, 1):
        (old,) = {part.parent for part in parts_of(tmp_path, node, 5)}
        shutil.copytree(old, tmp_path / f"node-{node}" / new.name / step_name(5))
    assert resumed(ranks, 2, tmp_path) == Resume(1, "local", (0, 1), ())


def test_another_number_of_ranks_takes_the_durable_tier(tmp_path: Path, ranks: RankPool) -> None:
    ranks.run(3, save_steps, str(tmp_path), [1, 2, 3], {"durable_every": 2})
    found = resumed(ranks, 2, tmp_path)
    reason = "step 3 of the local tier: it was saved by 3 ranks, and this world has 2"
    assert found == Resume(2, "durable", (), (reason,))


def load_in_another_layout(rank: int, size: int, folder: str) -> None:
    state = state_at(0, rank, size, filled=False)
    state["w"] = state_at(0, 1 - rank, size, filled=False)["w"]  # the other rank's half
    before = state["w"].data.clone()
    with tiers(folder, rank) as manager, pytest.raises(CheckpointMismatchError, match="the checkpoint holds 0 of"):
        manager.load(state)
    assert torch.equal(state["w"].data, before)


def test_another_layout_is_refused_before_memory_is_written(tmp_path: Path, ranks: RankPool) -> None:
    ranks.run(2, save_steps, str(tmp_path), [1], {})
    ranks.run(2, load_in_another_layout, str(tmp_path))


def test_half_of_a_step_is_no_step(tmp_path: Path, ranks: RankPool) -> None:
    """Rank 1 was killed before it wrote its part of step 2: its node has step 1, and rank 0 has both."""
    ranks.run(2, save_steps, str(tmp_path), [1, 2], {"keep_local": 2})
    for node in (0, 1):
        shutil.rmtree(parts_of(tmp_path, node, 2)[1])
    found = resumed(ranks, 2, tmp_path)
    assert found is not None
    assert (found.step, found.passed_over) == (1, ("step 2 of the local tier: the parts of ranks [1] are on no node",))


def test_parts_of_two_saves_of_one_step_are_not_mixed(tmp_path: Path, ranks: RankPool) -> None:
    ranks.run(2, save_steps, str(tmp_path), [1, 2], {"keep_local": 2})
    old = [tmp_path / f"old-{node}" for node in (0, 1)]
    for node in (0, 1):
        shutil.copytree(parts_of(tmp_path, node, 2)[1], old[node])
    ranks.run(2, save_steps, str(tmp_path), [2], {"keep_local": 2})
    for node in (0, 1):
        shutil.rmtree(parts_of(tmp_path, node, 2)[1])
        shutil.copytree(old[node], parts_of(tmp_path, node, 2)[0].with_name("rank-00001"))
    found = resumed(ranks, 2, tmp_path)
    assert found is not None
    assert found.step == 1
    assert len(found.passed_over) == 2


def test_a_run_that_goes_back_removes_the_local_steps_it_left(tmp_path: Path, ranks: RankPool) -> None:
    ranks.run(2, save_steps, str(tmp_path), [1, 5], {"keep_local": 3})
    ranks.run(2, save_steps, str(tmp_path), [3], {"keep_local": 3})
    assert resumed(ranks, 2, tmp_path) == Resume(3, "local", (0, 1), ())
    assert parts_of(tmp_path, 0, 5) == parts_of(tmp_path, 1, 5) == []


def test_ranks_that_changed_nodes_fetch_their_parts(tmp_path: Path, ranks: RankPool) -> None:
    ranks.run(3, save_steps, str(tmp_path), [1], {})
    for a, b in ((0, 3), (2, 0), (3, 2)):
        (tmp_path / f"node-{a}").rename(tmp_path / f"node-{b}")
    found = resumed(ranks, 3, tmp_path)
    assert found is not None
    assert (found.step, found.tier) == (1, "local")


def on_one_node(rank: int, size: int, folder: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        manager = tiers(folder, rank, per_node=size)
    warned = [str(warning.message) for warning in caught if "one node" in str(warning.message)]
    assert len(warned) == (rank == 0)
    assert manager.keepers == ()
    manager.save(1, state_at(1, rank, size))
    manager.close()
    again = tiers(folder, rank, per_node=size)
    found = again.find()
    assert found is not None
    assert found.tier == "local"
    assert_is_step(again.load(state_at(0, rank, size, filled=False)).state, 1, rank, size)
    again.close()


def test_on_one_node_there_are_no_copies_and_a_warning_says_so(tmp_path: Path, ranks: RankPool) -> None:
    ranks.run(2, on_one_node, str(tmp_path))
    assert [part.name for part in parts_of(tmp_path, 0, 1)] == ["rank-00000", "rank-00001"]


class FullDisk(UnsyncedFiles):
    """A local tier without room for another rank's copy."""

    def write(self, fd: int, data: bytes | memoryview) -> int:
        if "tmp-" in os.readlink(f"/proc/self/fd/{fd}") and self.full:
            raise OSError(28, "No space left on device")
        return super().write(fd, data)

    full = False


def fill_a_disk(rank: int, size: int, folder: str) -> None:
    files = FullDisk()
    manager = tiers(folder, rank, local_files=files)
    manager.save(1, state_at(1, rank, size))
    manager.wait()
    FullDisk.full = rank == 1
    manager.save(2, state_at(2, rank, size))
    with pytest.raises(CheckpointFailedError, match="No space left") as caught:
        manager.wait()
    assert caught.value.causes[1].errno == 28  # type: ignore[attr-defined]
    FullDisk.full = False
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
    jobs = []
    meeting = new_meeting(tmp_path)
    for rank in (0, 1):
        job = fork_server().Process(target=save_tiers_and_die, args=(rank, 2, meeting, str(tmp_path), victim))
        job.start()
        jobs.append(job)
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


def train(rank: int, size: int, folder: str) -> None:
    torch.manual_seed(0)
    model, other = torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    own = torch.full((3,), float(rank))
    with tiers(folder, rank) as manager:
        state = {"model": sharded_model(model), "optimizer": sharded_optimizer(model, optimizer), "step": 1}
        manager.save(1, {**state, "ema": {"own": sharded_like(f"own.{rank}", own)}})
        manager.wait()
    if rank == 0:
        shutil.rmtree(f"{folder}/node-1")
    torch.distributed.barrier()
    again = torch.optim.AdamW(other.parameters(), lr=0.2)
    with tiers(folder, rank) as manager:
        loaded = manager.load({"model": sharded_model(other), "step": None}, strict="ignore_all")
        manager.load_optimizer(other, again)
        assert manager.latest() == loaded.state["step"] == 1
    assert torch.equal(other.weight, model.weight)
    assert again.param_groups[0]["lr"] == 0.1
    for a, b in zip(optimizer.state.values(), again.state.values(), strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_model_and_its_optimizer_go_on_after_a_node_is_lost(tmp_path: Path, ranks: RankPool) -> None:
    ranks.run(2, train, str(tmp_path))


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
        _raises_damage(call)


def _raises_damage(call: Callable[[], object]) -> None:
    with pytest.raises(CheckpointCorruptError, match=r"run\.json is damaged"):
        call()


@pytest.mark.parametrize("name", ["durable_every", "keep_local"])
def test_numbers_below_one_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=0"):
        tiers(str(tmp_path), 0, **{name: 0})
