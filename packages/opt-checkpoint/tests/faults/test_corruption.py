"""F7, F8: any change to any file is found by `verify`, and by `load` for every byte that it uses."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_ranks import save_as_ranks
from states import assert_is_step, state_at

from opt_checkpoint import CheckpointCorruptError, CheckpointingException, load, verify_checkpoint

SIZE = 2


def flip(raw: bytearray, rng: random.Random) -> None:
    raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)


def truncate(raw: bytearray, rng: random.Random) -> None:
    del raw[rng.randrange(len(raw)) :]


def zero(raw: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(raw))
    raw[start : start + 4096] = bytes(len(raw[start : start + 4096]))


def swap(raw: bytearray, rng: random.Random) -> None:
    n = min(64, len(raw) // 2)
    a, b = sorted(rng.sample(range(len(raw) - n), 2))
    raw[a : a + n], raw[b : b + n] = raw[b : b + n], raw[a : a + n]


def append(raw: bytearray, rng: random.Random) -> None:
    raw += bytes([rng.randrange(256)])


CHANGES: list[Callable[[bytearray, random.Random], None]] = [flip, flip, truncate, zero, swap, append]


def corrupt(folder: Path, seed: int) -> Path | None:
    """Change one file in one way; the file, or None where the change changed nothing."""
    rng = random.Random(seed)
    path = rng.choice(sorted(folder.iterdir()))
    if rng.random() < 0.1:
        path.unlink()
        return path
    before = path.read_bytes()
    raw = bytearray(before)
    rng.choice(CHANGES)(raw, rng)
    path.write_bytes(raw)
    return path if raw != before else None


def check_corruption(good: Path, folder: Path, seed: int) -> None:
    shutil.copytree(good, folder)
    path = corrupt(folder, seed)
    if path is None:
        return
    findings = [str(finding) for finding in verify_checkpoint(folder)]
    assert any(path.name in finding for finding in findings), f"seed {seed}: {path} undetected: {findings}"
    wanted = state_at(0, 0, 1, filled=False)
    try:
        report = load(wanted, folder, verify="chunks")
    except CheckpointingException:
        assert (wanted["w"].data == -1).all(), f"seed {seed}: memory was touched"
        return
    assert_is_step(report.state, 1, 0, 1)


def test_every_corruption_is_found_and_never_loaded(tmp_path: Path, full: bool) -> None:
    good = tmp_path / "good"
    save_as_ranks([state_at(1, rank, SIZE) for rank in range(SIZE)], good)
    for seed in range(1000 if full else 150):
        check_corruption(good, tmp_path / str(seed), seed)


def test_damage_names_the_file_and_the_tensor(tmp_path: Path) -> None:
    save_as_ranks([state_at(1, 0, 1)], tmp_path / "x")
    file = tmp_path / "x" / "__0_0.distcp"
    raw = bytearray(file.read_bytes())
    at = raw.find(torch.arange(1000.0, 1004.0).numpy().tobytes())
    raw[at + 2] ^= 4
    file.write_bytes(raw)
    (finding,) = verify_checkpoint(tmp_path / "x")
    assert (finding.file, finding.keys) == ("__0_0.distcp", ("w",))
    with pytest.raises(CheckpointCorruptError, match=r"__0_0\.distcp is damaged: the values of w have changed"):
        load(state_at(0, 0, 1, filled=False), tmp_path / "x", verify="chunks")


def test_damage_met_while_reading_says_that_memory_was_touched(tmp_path: Path) -> None:
    save_as_ranks([state_at(1, 0, 1)], tmp_path / "x")
    file = tmp_path / "x" / "__0_0.distcp"
    raw = file.read_bytes()
    file.write_bytes(raw.replace(b"seedq", b"seedx", 1))
    assert file.read_bytes() != raw
    with pytest.raises(CheckpointCorruptError, match=r"partly overwritten, load again.*\n.*rng/shard_0_1 has changed"):
        load(state_at(0, 0, 1, filled=False), tmp_path / "x")


def test_files_of_another_save_are_found_though_their_sizes_are_the_same(tmp_path: Path) -> None:
    for step in (1, 2):
        save_as_ranks([state_at(step, rank, SIZE) for rank in range(SIZE)], tmp_path / str(step))
    first, second = (tmp_path / s / "__1_0.distcp" for s in "12")
    assert first.stat().st_size == second.stat().st_size
    shutil.copy(first, second)
    assert any("__1_0.distcp" in str(f) for f in verify_checkpoint(tmp_path / "2"))
    with pytest.raises(CheckpointCorruptError, match=r"__1_0\.distcp belongs to another save"):
        load(state_at(0, 0, 1, filled=False), tmp_path / "2")
