"""Checks whose absence no other test would notice: each fails when its check is taken out."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_ranks import save_as_ranks
from states import state_at

from opt_checkpoint import (
    AsyncSaver,
    CheckpointCorruptError,
    CheckpointingException,
    CheckpointMismatchError,
    ShardedTensor,
    load,
    save,
    sharded_like,
    verify_checkpoint,
)
from opt_checkpoint.boxes import Box
from opt_checkpoint.dcp.saving import CheckpointWriter
from opt_checkpoint.disk.manifest import decode_columns, encode_columns


def halves() -> list[dict[str, ShardedTensor]]:
    return [
        {"w": ShardedTensor.from_rank_offsets("w", torch.full((3, 2), float(rank)), (0, rank, 2))} for rank in (0, 1)
    ]


def overlap(path: Path) -> None:
    """Move the second chunk onto the first: the volumes still add up, and the second half is stored nowhere."""
    manifest, first_line = path / "manifest.bin", b"opt-checkpoint manifest 2\n"
    header, columns = decode_columns(first_line, manifest.read_bytes(), "manifest")
    columns["offsets"] = columns["offsets"] * 0
    manifest.write_bytes(encode_columns(first_line, header, columns))


@pytest.mark.parametrize("rows", [(0, 6), (3, 6)], ids=["all", "the second half"])
def test_rows_that_are_stored_nowhere_are_not_loaded(tmp_path: Path, rows: tuple[int, int]) -> None:
    save_as_ranks(halves(), tmp_path / "x")
    overlap(tmp_path / "x")
    part = torch.full((rows[1] - rows[0], 2), -1.0)
    shard = ShardedTensor("w", part, torch.float32, tuple(part.shape), (6, 2), (rows[0], 0), None)
    with pytest.raises(CheckpointCorruptError, match=r"chunks .* of w overlap"):
        load({"w": shard}, tmp_path / "x")
    assert (part == -1).all()


def test_a_wanted_box_that_is_not_covered_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were a stored chunk passed over while planning, the proof of coverage would notice."""
    save_as_ranks(halves(), tmp_path / "x")
    monkeypatch.setattr(Box, "overlap", lambda box, wanted: box if box.offsets == (0, 0) else None)
    target = torch.full((6, 2), -1.0)
    with pytest.raises(CheckpointMismatchError, match="holds 6 of 12 elements"):
        load({"w": sharded_like("w", target)}, tmp_path / "x")
    assert (target == -1).all()


def test_a_changed_common_value_is_noticed(tmp_path: Path) -> None:
    save({"note": "precious", "w": sharded_like("w", torch.ones(2))}, tmp_path / "x")
    file = tmp_path / "x" / "__0_0.distcp"
    file.write_bytes(file.read_bytes().replace(b"precious", b"pretious"))
    with pytest.raises(CheckpointCorruptError, match="common_state/shard_0_1 has changed"):
        load({"note": None}, tmp_path / "x")


def test_an_item_that_was_not_written_is_noticed_before_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = CheckpointWriter.write

    def forget(*arguments: Any) -> Any:
        written = write(*arguments)
        written.objects.popitem()
        return written

    monkeypatch.setattr(CheckpointWriter, "write", forget)
    with pytest.raises(CheckpointingException, match=r"rank 0 has not written the .* objects"):
        save(state_at(1, 0, 1), tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_a_data_file_that_is_not_of_the_checkpoint_is_found(tmp_path: Path) -> None:
    save(state_at(1, 0, 1), tmp_path / "x")
    shutil.copy(tmp_path / "x" / "__0_0.distcp", tmp_path / "x" / "__7_0.distcp")
    (finding,) = verify_checkpoint(tmp_path / "x")
    assert finding.file == "__7_0.distcp"


@pytest.mark.parametrize(
    ("one", "other"),
    [(torch.zeros(4), torch.zeros(2, 2)), (torch.zeros(4), torch.zeros(4, dtype=torch.int32))],
    ids=["shape", "dtype"],
)
def test_common_tensors_of_the_same_bytes_but_another_shape_or_dtype_differ(
    tmp_path: Path, one: torch.Tensor, other: torch.Tensor
) -> None:
    with pytest.raises(CheckpointingException, match="common values differ between ranks: scale"):
        save_as_ranks([{"scale": one}, {"scale": other}], tmp_path / "x")


def test_the_memory_of_tensors_that_are_no_longer_saved_is_freed(tmp_path: Path) -> None:
    saver = AsyncSaver()
    saver.save({"a": sharded_like("a", torch.ones(1000)), "b": sharded_like("b", torch.ones(10))}, tmp_path / "1")
    saver.save({"b": sharded_like("b", torch.ones(10))}, tmp_path / "2")
    assert sum(buffer.nbytes for buffer in saver._staging._buffers.values()) == 40
    saver.close()


def test_a_folder_that_only_has_a_name_like_ours_stays(tmp_path: Path) -> None:
    theirs = tmp_path / f".opt-checkpoint-tmp-{'0123456789abcdef' * 2}"
    theirs.mkdir()
    (theirs / "precious.txt").write_text("precious")
    for path in (theirs / "precious.txt", theirs):
        os.utime(path, (0, 0))
    save(state_at(1, 0, 1), tmp_path / "x")
    assert (theirs / "precious.txt").exists()
