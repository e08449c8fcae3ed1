"""F7, F8: any change to any file is found by `verify`, and by `load` for every byte that it uses."""

import os
import random
import resource
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from checkpoint_ranks import save_as_ranks
from failing_calls import bucket_in, damaged, flip_bit
from states import assert_is_step, state_at
from tiers import NIGHT

from opt_checkpoint import (
    CheckpointCorruptError,
    CheckpointingException,
    CheckpointManager,
    LoadReport,
    ShardedTensor,
    load,
    read_index,
    save,
    sharded_like,
    verify_checkpoint,
)

SIZE = 2


def test_every_corruption_is_found_and_never_loaded(tmp_path: Path) -> None:
    good = tmp_path / "good"
    save_as_ranks([state_at(1, rank, SIZE) for rank in range(SIZE)], good)
    for seed in range(1000 if NIGHT else 60):
        folder = tmp_path / str(seed)
        wanted = state_at(0, 0, 1, filled=False)
        shutil.copytree(good, folder)
        rng = random.Random(seed)
        path = rng.choice(sorted(folder.iterdir()))
        before = path.read_bytes()
        after = damaged(path.read_bytes(), rng)
        if rng.random() < 0.1:
            path.unlink()
        elif after != before:
            path.write_bytes(after)
        else:
            continue
        findings = [str(finding) for finding in verify_checkpoint(folder)]
        assert any(path.name in finding for finding in findings), f"seed {seed}: {path} undetected: {findings}"
        try:
            assert_is_step(load(wanted, folder, verify="chunks").state, 1, 0, 1)
        except CheckpointingException:
            assert (wanted["w"].data == -1).all(), f"seed {seed}: memory was touched"


def test_damage_names_file_and_tensor_and_whether_memory_changed(tmp_path: Path) -> None:
    save_as_ranks([state_at(1, 0, 1)], tmp_path / "x")
    place = read_index(tmp_path / "x").tensors["b"].chunks[0].place
    flip_bit(tmp_path / "x" / place.file, place.start)
    (finding,) = verify_checkpoint(tmp_path / "x")
    assert (finding.file, finding.keys) == ("__0_0.distcp", ("b",))
    changed = r"__0_0\.distcp is damaged: the values of b have changed"
    with pytest.raises(CheckpointCorruptError, match=changed) as caught:
        load(state_at(0, 0, 1, filled=False), tmp_path / "x", verify="chunks")
    assert "overwritten" not in str(caught.value)
    with pytest.raises(CheckpointCorruptError, match=rf"partly overwritten, load again.*{changed}"):
        load(state_at(0, 0, 1, filled=False), tmp_path / "x")


@pytest.mark.parametrize("in_bucket", [False, pytest.param(True, marks=pytest.mark.needs_extra)], ids=str)
def test_files_of_another_save_with_equal_sizes_are_found(tmp_path: Path, in_bucket: bool) -> None:
    """In a bucket the folder of a save has a name that nobody knows before."""
    place = bucket_in(tmp_path) if in_bucket else tmp_path
    for step in (1, 2):
        save_as_ranks([state_at(step, rank, SIZE) for rank in range(SIZE)], place / str(step))
    first, second = (next((tmp_path / step).rglob("__1_0.distcp")) for step in "12")
    assert first.stat().st_size == second.stat().st_size
    shutil.copy(first, second)
    shutil.copy(first, first.with_name("__7_0.distcp"))
    assert any("__1_0.distcp" in str(f) for f in verify_checkpoint(place / "2"))
    assert [finding.file for finding in verify_checkpoint(place / "1")] == ["__7_0.distcp"]
    shorter = partial(os.truncate, second, first.stat().st_size - 1)
    for damage, found in (
        (int, "belongs to a different save"),
        (shorter, "has .* bytes"),
        (second.unlink, "is missing"),
    ):
        damage()
        with pytest.raises(CheckpointCorruptError, match=rf"__1_0\.distcp:? {found}"):
            load(state_at(0, 0, 1, filled=False), place / "2")


def test_a_changed_common_value_is_noticed(tmp_path: Path) -> None:
    save({"note": "precious", "w": sharded_like("w", torch.ones(2))}, tmp_path / "x")
    file = tmp_path / "x" / "__0_0.distcp"
    file.write_bytes(file.read_bytes().replace(b"precious", b"pretious"))
    with pytest.raises(CheckpointCorruptError, match="common_state/shard_0_1 has changed"):
        load({"note": None}, tmp_path / "x")


PIECE = 1 << 20


@pytest.mark.parametrize("rows", [(0, 64), (0, 1), (63, 64), (20, 40)], ids=["all", "first", "last", "middle"])
def test_a_load_verifies_what_it_reads_and_reads_no_more_pieces(tmp_path: Path, rows: tuple[int, int]) -> None:
    """One chunk of 6.4 MB in pieces of 1 MiB, of which some rows are wanted."""
    whole = torch.randn(64, 25_000)
    save({"w": sharded_like("w", whole)}, tmp_path / "x")
    place = read_index(tmp_path / "x").tensors["w"].chunks[0].place
    file = tmp_path / "x" / place.file
    row = 25_000 * 4

    def load_rows() -> LoadReport:
        part = torch.zeros(rows[1] - rows[0], 25_000)
        shard = ShardedTensor("w", part, torch.float32, tuple(part.shape), (64, 25_000), (rows[0], 0), None)
        report = load({"w": shard}, tmp_path / "x")
        assert torch.equal(part, whole[rows[0] : rows[1]])
        return report

    first = rows[0] * row // PIECE
    last = -(-rows[1] * row // PIECE)
    report = load_rows()
    assert report.bytes_read == min(last * PIECE, place.nbytes) - first * PIECE
    for at in {rows[0] * row, (rows[0] + rows[1]) * row // 2, rows[1] * row - 1}:
        flip_bit(file, place.start + at)
        with pytest.raises(CheckpointCorruptError, match=r"__0_0\.distcp is damaged: the values of w have changed"):
            load_rows()
        flip_bit(file, place.start + at)
    for at in {first * PIECE - 1, last * PIECE} & set(range(place.nbytes)):
        flip_bit(file, place.start + at)  # in a piece that holds none of the rows
        load_rows()
        flip_bit(file, place.start + at)


@pytest.mark.parametrize("numel", [10, 100_000, 3_000_000], ids=["tiny", "small", "pieces"])
@pytest.mark.parametrize("turned", [False, True], ids=["run", "columns"])
def test_a_changed_bit_is_noticed_however_the_values_are_read(tmp_path: Path, numel: int, turned: bool) -> None:
    whole = torch.randn(numel // 10, 10)
    neighbours = {f"n{i}": sharded_like(f"n{i}", torch.ones(5)) for i in range(3)}
    save({"w": sharded_like("w", whole), **neighbours}, tmp_path / "x")
    place = read_index(tmp_path / "x").tensors["w"].chunks[0].place
    flip_bit(tmp_path / "x" / place.file, place.start + place.nbytes // 2)
    target = torch.zeros(10, numel // 10).t() if turned else torch.zeros(numel // 10, 10)
    with pytest.raises(CheckpointCorruptError, match="the values of w have changed"):
        load({"w": sharded_like("w", target), **neighbours}, tmp_path / "x")
    load({"w": sharded_like("w", target), **neighbours}, tmp_path / "x", verify="none")


def test_verifying_first_reads_just_the_chunks_that_are_wanted(tmp_path: Path) -> None:
    states = [{"w": sharded_like("w", torch.ones(4, 9)).flat(torch.ones(18), a, a + 18)} for a in (0, 18)]
    save_as_ranks(states, tmp_path / "x")
    second = tmp_path / "x" / read_index(tmp_path / "x").tensors["w"].chunks[1].place.file
    place = read_index(tmp_path / "x").tensors["w"].chunks[1].place
    flip_bit(second, place.start)
    part = torch.zeros(1, 9)
    load({"w": ShardedTensor("w", part, torch.float32, (1, 9), (4, 9), (0, 0), None)}, tmp_path / "x", verify="chunks")
    assert (part == 1).all()


def test_more_files_than_may_be_open_load_and_verify(tmp_path: Path) -> None:
    size = 400
    whole = torch.arange(2.0 * size)
    states = [{"w": sharded_like("w", whole).flat(whole[2 * r : 2 * r + 2], 2 * r, 2 * r + 2)} for r in range(size)]
    save_as_ranks(states, tmp_path / "step-000000001")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        target = torch.zeros(2 * size)
        manager = CheckpointManager(tmp_path, in_background=False)
        assert manager.latest() == 1
        manager.load({"w": sharded_like("w", target)}, verify="chunks")
        assert verify_checkpoint(tmp_path / "step-000000001") == []
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert torch.equal(target, whole)
