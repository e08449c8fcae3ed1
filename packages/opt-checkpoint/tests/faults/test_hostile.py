"""F13: hostile files. No code runs, no file outside the directory is opened, nothing huge is allocated."""

from __future__ import annotations

import io
import json
import os
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_ranks import save_as_ranks
from old_format import manifest_body, rewrite, to_old_format
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
    save,
    verify_checkpoint,
)
from opt_checkpoint.disk.columns import decode_columns, encode_columns


class Hostile:
    """Its pickle runs a command."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """A checkpoint of format 1, whose manifest is easy to forge."""
    save_as_ranks([state_at(1, 0, 1)], tmp_path / "ours")
    return to_old_format(tmp_path / "ours")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_hostile_metadata_pickle_is_refused(tmp_path: Path, protocol: int) -> None:
    dcp_save({"w": torch.zeros(3)}, checkpoint_id=tmp_path / "x")
    (tmp_path / "x" / ".metadata").write_bytes(pickle.dumps(Hostile(tmp_path / "ran"), protocol=protocol))
    for attempt in (read_index, lambda path: load({}, path)):
        with pytest.raises(CheckpointCorruptError, match=r"names (posix|nt)\.system, which no checkpoint needs"):
            attempt(tmp_path / "x")
    assert verify_checkpoint(tmp_path / "x")
    assert not (tmp_path / "ran").exists()


def test_a_hostile_object_is_refused(tmp_path: Path, ours: Path) -> None:
    stream = io.BytesIO()
    torch.save([Hostile(tmp_path / "ran")], stream)
    raw = stream.getvalue()
    content = json.loads(manifest_body(ours))
    file = ours / "__0_0.distcp"
    place = ["__0_0.distcp", file.stat().st_size, len(raw), zlib.crc32(raw)]
    file.write_bytes(file.read_bytes() + raw)
    content["objects"]["rng/shard_0_1"] = content["objects"]["common_state/shard_0_1"] = place
    content["files"]["__0_0.distcp"] = {"size": file.stat().st_size, "crc32": zlib.crc32(file.read_bytes())}
    rewrite(ours, content)
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


def place_outside(name: str) -> Callable[[Any], None]:
    def change(content: Any) -> None:
        content["files"][name] = content["files"]["__0_0.distcp"]
        content["tensors"]["w"]["chunks"][0][2] = name

    return change


def set_chunk(position: int, value: Any) -> Callable[[Any], None]:
    def change(content: Any) -> None:
        content["tensors"]["w"]["chunks"][0][position] = value

    return change


def set_tensor(field: str, value: Any) -> Callable[[Any], None]:
    return lambda content: content["tensors"]["w"].__setitem__(field, value)


LIES = {
    "a path upwards": place_outside("../secret"),
    "an absolute path": place_outside("/etc/passwd"),
    "a folder": place_outside("sub/secret"),
    "two dots": place_outside(".."),
    "an empty name": place_outside(""),
    "a start beyond the file": set_chunk(3, 1 << 50),
    "a negative start": set_chunk(3, -8),
    "a size beyond the file": set_chunk(4, 1 << 60),
    "a size that is not the chunk's": set_chunk(4, 12),
    "a huge chunk": set_chunk(1, [1 << 30, 1 << 30]),
    "a chunk outside the tensor": set_chunk(0, [5, 5]),
    "a chunk of other rank": set_chunk(0, [0]),
    "a huge shape": set_tensor("shape", [1 << 30, 1 << 30]),
    "a negative shape": set_tensor("shape", [-12, -40]),
    "an unknown dtype": set_tensor("dtype", "os.system"),
    "chunks that are missing": set_tensor("chunks", []),
    "chunks that are no list": set_tensor("chunks", 5),
    "no tensors": lambda content: content.pop("tensors"),
    "files that are no mapping": lambda content: content.__setitem__("files", [1]),
    "a future format": lambda content: content.__setitem__("format", 99),
    "an object beyond the file": lambda content: content["objects"]["rng/shard_0_1"].__setitem__(1, 1 << 50),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_a_manifest_with_wrong_values_is_refused_before_any_file_is_opened(
    ours: Path, lie: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    (ours.parent / "secret").write_bytes((ours / "__0_0.distcp").read_bytes())
    content = json.loads(manifest_body(ours))
    lie(content)
    rewrite(ours, content)
    opened: list[str] = []
    os_open = os.open
    monkeypatch.setattr(os, "open", lambda path, *a, **k: opened.append(str(path)) or os_open(path, *a, **k))
    wanted = state_at(0, 0, 1, filled=False)
    with pytest.raises(CheckpointCorruptError):
        load(wanted, ours, verify="none")
    assert opened == [str(ours / "manifest.bin"), str(ours / "manifest.json")]  # the first is not there
    assert (wanted["w"].data == -1).all()


def column(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda header, columns: columns.__setitem__(name, change(columns[name].copy()))


def put(position: Any, value: int) -> Callable[[Any], Any]:
    def change(array: Any) -> Any:
        array[position] = value
        return array

    return change


def rename_file(header: dict[str, Any], columns: dict[str, Any]) -> None:
    header["files"] = [["../secret" if name.endswith(".distcp") else name, *rest] for name, *rest in header["files"]]


COLUMN_LIES = {
    "a path upwards": rename_file,
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
    tmp_path: Path, lie: Callable[[Any, Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_as_ranks([state_at(1, 0, 1)], tmp_path / "x")
    manifest, first_line = tmp_path / "x" / "manifest.bin", b"opt-checkpoint manifest 2\n"
    header, columns = decode_columns(first_line, manifest.read_bytes(), "manifest")
    lie(header, columns)
    manifest.write_bytes(encode_columns(first_line, header, columns))
    opened: list[str] = []
    os_open = os.open
    monkeypatch.setattr(os, "open", lambda path, *a, **k: opened.append(str(path)) or os_open(path, *a, **k))
    wanted = state_at(0, 0, 1, filled=False)
    with pytest.raises(CheckpointCorruptError):
        load(wanted, tmp_path / "x", verify="none")
    assert opened == [str(manifest)]
    assert (wanted["w"].data == -1).all()


def test_a_truncated_manifest_does_not_make_the_directory_a_stock_checkpoint(ours: Path) -> None:
    (ours / "manifest.json").unlink()
    with pytest.raises(CheckpointCorruptError, match=r"written by opt-checkpoint, but its manifest\.bin is gone"):
        load({}, ours)


@pytest.mark.parametrize("value", [object(), lambda: 0], ids=["object", "lambda"])
def test_a_value_that_could_not_be_loaded_safely_is_refused_when_saving(tmp_path: Path, value: Any) -> None:
    with pytest.raises(CheckpointingException, match="could not be loaded again without running its pickle"):
        save({"x": value}, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []
