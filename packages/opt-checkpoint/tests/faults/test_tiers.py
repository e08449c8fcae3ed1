"""Two tiers: nodes that are lost, copies that are damaged, steps that are half replicated, and runs that are others."""

import errno
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoint_ranks import run_ranks
from failing_calls import Calls, failing, flip_bit
from local_tiers import parts_of, resume, resume_and_save, resumed, save_steps, tiers
from small_models import assert_same_state, assert_same_weights, grouped, network, state_of, trained
from states import state_at

from opt_checkpoint import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointFailedError,
    CheckpointManager,
    CheckpointNotFoundError,
    Resume,
    committed_steps,
    sharded_model,
    sharded_optimizer,
    verify_checkpoint,
)
from opt_checkpoint.disk.data_file import FILE_MARK
from opt_checkpoint.run.series import step_name
from opt_checkpoint.tiers.local_tier import newest_whole
from opt_checkpoint.tiers.parts import PartName

DATA = "__0_0.distcp"  # of a part


def test_ranks_resume_from_own_parts_with_copies_on_other_nodes(tmp_path: Path) -> None:
    """Two ranks on one node, and one on the other, which keeps the copies of both."""
    options = {"per_node": 2, "durable_every": 20, "keep_local": 2}
    assert run_ranks(3, save_steps, str(tmp_path), [10, 20, 30], options) == [[False, True, False]] * 3
    for node in (0, 1):
        for step in (20, 30):
            assert [part.name for part in parts_of(tmp_path, node, step)] == [f"rank-{owner:05d}" for owner in range(3)]
            assert all(verify_checkpoint(part) == [] for part in parts_of(tmp_path, node, step))
        assert parts_of(tmp_path, node, 10) == []
    assert resumed(3, tmp_path, **options) == Resume(30, "local", (0, 1, 2), ())


def test_the_newest_step_resumes_from_copies_after_a_lost_node(tmp_path: Path) -> None:
    for lost in range(3):
        folder = tmp_path / str(lost)
        run_ranks(3, save_steps, str(folder), [1, 2], {"durable_every": 1} if lost == 2 else {})
        shutil.rmtree(folder / f"node-{lost}")
        holders = tuple((rank + 1) % 3 if rank == lost else rank for rank in range(3))
        assert resumed(3, folder) == Resume(2, "local", holders, ())
        assert resumed(3, folder) == Resume(2, "local", (0, 1, 2), ())  # the fetched part stays
    for lost in (0, 1):
        shutil.rmtree(folder / f"node-{lost}")
    reasons = ("step 2 of the local tier: the parts of ranks [0, 1] are on no node",)
    assert resumed(3, folder) == Resume(2, "durable", (), reasons)


def test_a_damaged_part_resumes_from_its_copy_or_an_older_step(tmp_path: Path) -> None:
    run_ranks(2, save_steps, str(tmp_path), [1, 2], {"keep_local": 2})
    own, copy = (parts_of(tmp_path, node, 2)[0] for node in (0, 1))
    flip_bit(own / DATA)
    found = resumed(2, tmp_path)
    assert (found.step, found.tier, found.holders) == (2, "local", (1, 1))
    (reason,) = found.skipped_reasons
    assert "rank 0's part" in reason
    assert DATA in reason
    assert verify_checkpoint(own) == []
    (own / "manifest.bin").write_bytes(b"nothing")
    assert resumed(2, tmp_path) == Resume(2, "local", (1, 1), ())
    (own / DATA).unlink()
    assert resumed(2, tmp_path) == Resume(2, "local", (1, 1), ())
    for part in (own, copy):
        flip_bit(part / DATA)
    found = resumed(2, tmp_path)
    assert (found.step, found.holders) == (1, (0, 1))
    assert any("the parts of ranks [0] are on no node" in reason for reason in found.skipped_reasons)


def test_the_newer_of_two_tiers_is_taken(tmp_path: Path) -> None:
    run_ranks(2, save_steps, str(tmp_path), [10], {"durable_every": 10})
    assert resumed(2, tmp_path) == Resume(10, "local", (0, 1), ())  # of equal steps the local one
    run_ranks(2, save_durably, str(tmp_path), 15)
    assert resumed(2, tmp_path) == Resume(15, "durable", (), ())
    run_ranks(2, save_steps, str(tmp_path), [20], {})
    assert resumed(2, tmp_path) == Resume(20, "local", (0, 1), ())


def save_durably(rank: int, size: int, folder: str, step: int) -> None:
    with CheckpointManager(f"{folder}/durable") as manager:
        manager.save(step, state_at(step, rank, size))


def test_parts_of_another_run_are_never_taken(tmp_path: Path) -> None:
    run_ranks(2, save_steps, str(tmp_path), [5], {})
    shutil.rmtree(tmp_path / "durable")
    assert resumed(2, tmp_path) is None  # a new run has no name yet
    run_ranks(2, save_steps, str(tmp_path), [1], {})
    assert resumed(2, tmp_path) == Resume(1, "local", (0, 1), ())
    # Parts of the old run under the new run's name are recognised by what is written in them.
    (new,) = {part.parent.parent for part in parts_of(tmp_path, 0, 1)}
    for node in (0, 1):
        (old,) = {part.parent for part in parts_of(tmp_path, node, 5)}
        shutil.copytree(old, tmp_path / f"node-{node}" / new.name / step_name(5))
    assert resumed(2, tmp_path) == Resume(1, "local", (0, 1), ())


def test_parts_of_two_saves_of_one_step_are_not_mixed(tmp_path: Path) -> None:
    run_ranks(2, save_steps, str(tmp_path), [1, 2], {"keep_local": 2})
    old = [tmp_path / f"old-{node}" for node in (0, 1)]
    for node in (0, 1):
        shutil.copytree(parts_of(tmp_path, node, 2)[1], old[node])
    run_ranks(2, resume_and_save, str(tmp_path), [2], {"keep_local": 2})
    for node in (0, 1):
        shutil.rmtree(parts_of(tmp_path, node, 2)[1])
        shutil.copytree(old[node], parts_of(tmp_path, node, 2)[0].with_name("rank-00001"))
    found = resumed(2, tmp_path)
    assert found.step == 1
    assert len(found.skipped_reasons) == 2


@pytest.mark.filterwarnings("ignore:.*one node")
def test_a_node_that_comes_back_does_not_undo_a_rollback(tmp_path: Path) -> None:
    """Its later local step was of the run, and newer than all of the good ones."""
    on_node = lambda node: tiers(str(tmp_path), node, durable_every=40, keep=9)
    with on_node(0) as manager:
        for step in range(20, 160, 20):
            manager.save(step, state_at(step, 0, 1))
    with CheckpointManager(tmp_path / "durable") as durable:
        durable.load(state_at(0, 0, 1, filled=False), step=80)
    with on_node(1) as manager:
        for step in (100, 120):
            manager.save(step, state_at(step, 0, 1))
    assert on_node(0).find() == Resume(120, "durable", (), ())
    assert on_node(1).find() == Resume(120, "local", (0,), ())
    with on_node(0) as manager:
        manager.load(state_at(0, 0, 1, filled=False))
        manager.save(140, state_at(140, 0, 1))
    assert [path.name for path in (tmp_path / "node-0").glob("*/*")] == [step_name(140)]  # the diverged one is removed


@pytest.mark.filterwarnings("ignore:.*one node")
def test_a_reader_finds_local_steps_of_a_run_named_anew(tmp_path: Path) -> None:
    with tiers(str(tmp_path), 0) as manager:
        manager.save(20, state_at(20, 0, 1))
    reader = tiers(str(tmp_path), 0)
    assert reader.find() == Resume(20, "local", (0,), ())
    with tiers(str(tmp_path), 0) as manager:
        manager.save(30, state_at(30, 0, 1))
    with pytest.raises(CheckpointNotFoundError):
        reader.load(state_at(0, 0, 1, filled=False))  # that of before, which was removed
    assert reader.find() == Resume(30, "local", (0,), ())


@pytest.mark.filterwarnings("ignore:.*one node")
def test_a_failed_first_save_leaves_the_local_steps_of_before(tmp_path: Path) -> None:
    """The run had a new name by then."""
    with tiers(str(tmp_path), 0) as manager:
        manager.save(20, state_at(20, 0, 1))
    manager = tiers(str(tmp_path), 0)
    full = Calls(failing(99, lambda name, key: "node-0" in key, errno.ENOSPC))
    with full, pytest.raises(CheckpointFailedError, match="No space left"):
        manager.save(30, state_at(30, 0, 1)) or manager.wait()
    assert resume(0, 1, str(tmp_path), {}) == Resume(20, "local", (0,), ())


@pytest.mark.filterwarnings("ignore:.*one node")
def test_a_trainer_that_goes_on_beside_its_successor_is_refused(tmp_path: Path) -> None:
    """Its local save removed the other's local steps and abandoned the durable ones."""
    before = tiers(str(tmp_path), 0, durable_every=40, keep=9)
    for step in (20, 40):
        before.save(step, state_at(step, 0, 1))
    before.wait()
    with tiers(str(tmp_path), 0, durable_every=40, keep=9) as successor:
        successor.load(state_at(0, 0, 1, filled=False))
        for step in (60, 80, 100, 120):
            successor.save(step, state_at(step, 0, 1))
    with pytest.raises(CheckpointExistsError, match=r"step 80 in .* was saved by another trainer"):
        before.save(60, state_at(60, 0, 1)) or before.wait()
    assert resume(0, 1, str(tmp_path), {}) == Resume(120, "local", (0,), ())


@pytest.mark.filterwarnings("ignore:.*one node")
def test_a_run_that_goes_back_locally_saves_durably_again(tmp_path: Path) -> None:
    with tiers(str(tmp_path), 0, durable_every=20, keep=9) as manager:
        saved = [manager.save(step, state_at(step, 0, 1)) for step in (20, 40, 30, 50)]
    assert saved == [True, True, False, True]
    assert committed_steps(tmp_path / "durable") == [20, 50]


@pytest.mark.filterwarnings("ignore:.*one node")
def test_a_copy_of_a_run_reads_no_local_steps_of_its_original(tmp_path: Path) -> None:
    with tiers(str(tmp_path), 0, durable_every=20) as manager:
        manager.save(20, state_at(20, 0, 1))
        manager.wait()
        shutil.copytree(tmp_path / "durable", tmp_path / "copy" / "durable")
        manager.save(30, state_at(30, 0, 1))
    (tmp_path / "copy" / "node-0").symlink_to(tmp_path / "node-0")
    assert resume(0, 1, str(tmp_path / "copy"), {}) == Resume(20, "durable", (), ())
    assert resume(0, 1, str(tmp_path), {}) == Resume(30, "local", (0,), ())


def test_ambiguous_saves_of_a_step_are_skipped() -> None:
    part = lambda rank, step, save="a": PartName("run", step, save, rank, 2)
    seen = [{part(rank, 2, "a"), part(rank, 2, "b"), part(1 - rank, 1)} for rank in (0, 1)]
    found = newest_whole(seen, run="run", not_before=0)
    assert found.local == (1, "a", (1, 0))
    assert found.skipped_reasons == (found.unusable,)


def test_a_run_that_goes_back_removes_the_local_steps_it_left(tmp_path: Path) -> None:
    run_ranks(2, save_steps, str(tmp_path), [1, 5], {"keep_local": 3})
    run_ranks(2, save_steps, str(tmp_path), [3], {"keep_local": 3})
    assert resumed(2, tmp_path) == Resume(3, "local", (0, 1), ())
    assert parts_of(tmp_path, 0, 5) == parts_of(tmp_path, 1, 5) == []


def test_on_one_node_there_are_no_copies(tmp_path: Path) -> None:
    run_ranks(2, save_steps, str(tmp_path), [1], {"per_node": 2})
    assert [part.name for part in parts_of(tmp_path, 0, 1)] == ["rank-00000", "rank-00001"]
    assert resumed(2, tmp_path, per_node=2) == Resume(1, "local", (0, 1), ())


def train_on_two_nodes(rank: int, size: int, folder: str) -> None:
    (model, optimizer) = trained()
    other = network(2)
    again = grouped(other)
    with tiers(folder, rank) as manager:
        manager.save(1, {"model": sharded_model(model), "optimizer": sharded_optimizer(model, optimizer), "step": 1})
    if rank == 0:
        shutil.rmtree(f"{folder}/node-1")
    dist.barrier()
    with tiers(folder, rank) as manager:
        loaded = manager.load({"model": sharded_model(other), "step": None}, strict="ignore_all")
        manager.load_optimizer(other, again)
        assert manager.latest() == loaded.state["step"] == 1
    assert_same_weights(other, model)
    assert_same_state(state_of(other, again), state_of(model, optimizer))


def test_a_model_and_its_optimizer_go_on_after_a_node_is_lost(tmp_path: Path) -> None:
    run_ranks(2, train_on_two_nodes, str(tmp_path))


def save_to_both(rank: int, size: int, folder: str) -> int:
    """Save to both tiers at the same time, whose threads run in another order on each rank; how many groups it took."""
    made = []
    new_group = dist.new_group
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dist, "new_group", lambda *given, **options: made.append(rank) or new_group(*given, **options))
        save_steps(rank, size, folder, [*range(1, 9)], {"durable_every": 1})
    return len(made)


def test_background_saves_of_both_tiers_share_one_process_group(tmp_path: Path) -> None:
    assert run_ranks(3, save_to_both, str(tmp_path)) == [1, 1, 1]
    assert committed_steps(tmp_path / "durable") == [6, 7, 8]
    assert resumed(3, tmp_path) == Resume(8, "local", (0, 1, 2), ())


# ----- faults


def damage_a_copy_on_its_way(rank: int, size: int, folder: str) -> None:
    """Rank 1's part is damaged after it was written, or between the nodes: the copy must not count."""
    send = dist.isend
    sent = list[int]()

    def flip(chunk: torch.Tensor, *args: object, **options: object) -> object:
        if bytes(chunk[: len(FILE_MARK)].tolist()) == FILE_MARK:  # not the manifest, which has a checksum of its own
            sent.append(chunk.numel())
            chunk[chunk.numel() // 2] ^= 4
        return send(chunk, *args, **options)

    with tiers(folder, rank) as manager, pytest.MonkeyPatch.context() as patched:
        manager.save(1, state_at(1, rank, size))
        manager.wait()
        patched.setattr(dist, "isend", flip if rank == 1 else send)
        manager.save(2, state_at(2, rank, size))
        with pytest.raises(CheckpointCorruptError, match="on rank 1 is damaged"):
            manager.wait()
    assert bool(sent) == (rank == 1)


def test_a_copied_part_is_checked_on_receipt(tmp_path: Path) -> None:
    run_ranks(2, damage_a_copy_on_its_way, str(tmp_path))
    assert [part.name for part in parts_of(tmp_path, 0, 2)] == ["rank-00000"]


def fill_a_disk(rank: int, size: int, folder: str) -> None:
    with tiers(folder, rank) as manager:
        manager.save(1, state_at(1, rank, size))
        manager.wait()
        no_room = failing(1000 * rank, lambda name, key: name == "write" and "tmp-" in key, 28)  # no room for a copy
        with Calls(no_room):
            manager.save(2, state_at(2, rank, size))
            with pytest.raises(CheckpointFailedError, match="No space left") as caught:
                manager.wait()
        assert caught.value.causes[1].errno == 28  # type: ignore[attr-defined]
        assert manager.latest() == 1
        manager.save(3, state_at(3, rank, size))  # the next one goes on


def test_a_full_disk_is_an_error_on_all_and_keeps_the_last_step(tmp_path: Path) -> None:
    run_ranks(2, fill_a_disk, str(tmp_path))
    assert resumed(2, tmp_path) == Resume(3, "local", (0, 1), ())


def break_copies_off(rank: int, size: int, folder: str) -> None:
    def lost(*arguments: object, **options: object) -> None:
        raise RuntimeError("connection reset by peer")

    with tiers(folder, rank, keep_local=2) as manager, pytest.MonkeyPatch.context() as patched:
        manager.save(1, state_at(1, rank, size))
        manager.wait()
        patched.setattr(dist, "isend", lost)
        manager.save(2, state_at(2, rank, size))
        with pytest.raises(CheckpointFailedError, match="a rank did not answer"):
            manager.wait()


def test_broken_copies_resume_from_own_parts_or_the_last_step(tmp_path: Path) -> None:
    run_ranks(2, break_copies_off, str(tmp_path))
    for node in (0, 1):
        (part,) = parts_of(tmp_path, node, 2)
        # by a rank that was killed in a copy, and in a removal
        run = part.parent.parent
        left = "a" * 32
        part.with_name(f".opt-checkpoint-tmp-{left}").mkdir()
        shutil.copytree(part, run / f".opt-checkpoint-deleting-{left}")
    assert resumed(2, tmp_path) == Resume(2, "local", (0, 1), ())
    shutil.rmtree(tmp_path / "node-0")
    assert (resumed(2, tmp_path).step, resumed(2, tmp_path).holders) == (1, (0, 1))
    run_ranks(2, resume_and_save, str(tmp_path), [3], {})
    assert [path.name for path in run.iterdir()] == [step_name(3)]
    assert resumed(2, tmp_path) == Resume(3, "local", (0, 1), ())


@pytest.mark.filterwarnings("ignore:.*one node")
def test_one_process_resumes_locally_and_a_reader_writes_nothing(tmp_path: Path) -> None:
    with tiers(str(tmp_path), 0, durable_every=2) as manager:
        assert manager.find() is None
        with pytest.raises(CheckpointNotFoundError):
            manager.load({})
        assert list(tmp_path.iterdir()) == []
        assert [manager.save(step, state_at(step, 0, 1)) for step in (1, 2, 3)] == [False, True, False]
    assert resume(0, 1, str(tmp_path), {}) == Resume(3, "local", (0,), ())


@pytest.mark.filterwarnings("ignore:.*one node")
@pytest.mark.parametrize("content", [b"", b"[]", b'{"run": "../other"}', b'{"run": 3}'])
def test_a_damaged_name_of_the_run_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "durable").mkdir()
    (tmp_path / "durable" / "run.json").write_bytes(content)
    manager = tiers(str(tmp_path), 0)
    for call in (manager.find, lambda: manager.save(1, {"step": 1})):
        with pytest.raises(CheckpointCorruptError, match=r"run\.json is damaged"):
            call()
    for name in ("durable_every", "keep_local"):
        with pytest.raises(ValueError, match=f"{name}=0"):
            tiers(str(tmp_path), 0, **{name: 0})
