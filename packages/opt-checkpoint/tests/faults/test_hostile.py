"""F13: hostile files. No code runs, no file outside the directory is opened, nothing huge is allocated."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_ranks import save_as_ranks
from states import state_at
from torch.distributed.checkpoint import save as dcp_save

from opt_checkpoint import (
    CheckpointCorruptError,
    CheckpointingException,
    ShardedObject,
    ShardedTensor,
    load,
    read_common,
    read_index,
)
from opt_checkpoint.disk.data_file import crc32
from opt_checkpoint.disk.manifest import decode_columns, encode_columns


class Hostile:
    """Its pickle runs a command."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    save_as_ranks([state_at(1, 0, 1)], tmp_path / "ours")
    return tmp_path / "ours"


def forge(path: Path, lie: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Change a manifest, and give it the checksum of the changed bytes."""
    manifest, first_line = path / "manifest.bin", b"opt-checkpoint manifest 2\n"
    header, columns = decode_columns(first_line, manifest.read_bytes(), "manifest")
    lie(header, columns)
    manifest.write_bytes(encode_columns(first_line, header, columns))


def test_a_hostile_object_is_refused(tmp_path: Path, ours: Path) -> None:
    stream = io.BytesIO()
    torch.save([Hostile(tmp_path / "ran")], stream)
    raw = stream.getvalue()
    file = ours / "__0_0.distcp"
    place = ["__0_0.distcp", file.stat().st_size, len(raw), crc32(raw)]
    file.write_bytes(file.read_bytes() + raw)

    def lie(header: dict[str, Any], columns: dict[str, Any]) -> None:
        header["objects"] = [[key, *place] for key in ("rng/shard_0_1", "common_state/shard_0_1")]
        others = [row for row in header["files"] if row[0] != file.name]
        header["files"] = [[file.name, file.stat().st_size, crc32(file.read_bytes())], *others]

    forge(ours, lie)
    with pytest.raises(CheckpointCorruptError, match="cannot be loaded safely"):
        read_common(read_index(ours))
    with pytest.raises(CheckpointCorruptError, match="cannot be loaded safely"):
        load({"rng": ShardedObject("rng", None, (1,), (0,))}, ours)
    assert not (tmp_path / "ran").exists()


@pytest.mark.filterwarnings("ignore")
def test_a_hostile_stock_chunk_is_refused(tmp_path: Path) -> None:
    stream = io.BytesIO()
    torch.save(Hostile(tmp_path / "ran"), stream)
    dcp_save({"w": torch.zeros(3000)}, checkpoint_id=tmp_path / "x")
    (file,) = (tmp_path / "x").glob("*.distcp")
    raw = stream.getvalue()
    file.write_bytes(raw.ljust(file.stat().st_size, b"\0")[: file.stat().st_size])
    data = torch.full((3000,), 7.0)
    with pytest.raises(CheckpointingException):
        load({"w": ShardedTensor.from_rank_offsets("w", data)}, tmp_path / "x")
    assert (data == 7).all()
    assert not (tmp_path / "ran").exists()


def column(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda header, columns: columns.__setitem__(name, change(columns[name].copy()))


def put(position: Any, value: int) -> Callable[[Any], Any]:
    def change(array: Any) -> Any:
        array[position] = value
        return array

    return change


def rename_file(name: str) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(header: dict[str, Any], columns: dict[str, Any]) -> None:
        header["files"] = [[name if old.endswith(".distcp") else old, *rest] for old, *rest in header["files"]]

    return change


COLUMN_LIES = {
    "a path upwards": rename_file("../secret"),
    "an absolute path": rename_file("/etc/passwd"),
    "a folder": rename_file("sub/secret"),
    "two dots": rename_file(".."),
    "an empty name": rename_file(""),
    "a negative size of a file": lambda h, c: h["files"][0].__setitem__(1, -1),
    "a start beyond the file": column("start", put(-1, 1 << 50)),
    "a negative start": column("start", put(-1, -8)),
    "a huge start": column("start", put(-1, (1 << 63) - 1)),
    "a file that is not listed": column("file", put(-1, 99)),
    "a chunk outside the tensor": column("offsets", put((-1, 0), 5)),
    "a huge chunk": column("sizes", put((-1, slice(None)), 1 << 40)),
    "an empty chunk": column("sizes", put((-1, 0), 0)),
    "a huge shape": column("shape", put((-1, slice(None)), 1 << 61)),
    "a negative shape": column("shape", put((-1, 0), -12)),
    "more axes than there are": column("ndim", put(-1, 7)),
    "an axis less": column("ndim", put(-1, 1)),
    "an unknown dtype": lambda h, c: h.__setitem__("dtypes", ["os.system"]),
    "a dtype that is not listed": column("dtype", put(-1, 9)),
    "a chunk too many": column("chunks", put(-1, 2)),
    "chunks of nobody": column("chunks", put(-1, 0)),
    "a checksum too few": column("sums", lambda a: a[1:]),
    "a key too long": column("key_bytes", put(0, 1 << 30)),
    "a key that is not text": column("keys", put(0, 0xFF)),
    "no column of keys": lambda h, c: c.pop("keys"),
    "a column of another dtype": lambda h, c: c.__setitem__("start", c["file"]),
    "no files": lambda h, c: h.pop("files"),
    "an object beyond the file": lambda h, c: h["objects"][0].__setitem__(2, 1 << 50),
}


@pytest.mark.parametrize("lie", COLUMN_LIES.values(), ids=COLUMN_LIES.keys())
def test_columns_that_lie_are_refused_before_any_file_is_opened(
    ours: Path, lie: Callable[[Any, Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    forge(ours, lie)
    (ours.parent / "secret").write_bytes((ours / "__0_0.distcp").read_bytes())
    opened: list[str] = []
    os_open = os.open
    monkeypatch.setattr(os, "open", lambda path, *a, **k: opened.append(str(path)) or os_open(path, *a, **k))
    wanted = state_at(0, 0, 1, filled=False)
    with pytest.raises(CheckpointCorruptError):
        load(wanted, ours, verify="none")
    assert opened == [str(ours / "manifest.bin")]
    assert (wanted["w"].data == -1).all()


def test_a_truncated_manifest_does_not_make_the_directory_a_stock_checkpoint(ours: Path) -> None:
    (ours / "manifest.bin").unlink()
    with pytest.raises(CheckpointCorruptError, match=r"written by opt-checkpoint, but its manifest\.bin is gone"):
        load({}, ours)
