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


def manifest_body(path: Path) -> bytes:
    return (path / "manifest.json").read_bytes().rpartition(b"\n#crc32=")[0]


def rewrite(path: Path, content: Any) -> None:
    """A manifest with a right checksum: what a forger, not an accident, would leave."""
    body = json.dumps(content).encode()
    (path / "manifest.json").write_bytes(body + f"\n#crc32={zlib.crc32(body):08x}\n".encode())


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
def test_a_manifest_that_lies_is_refused_before_any_file_is_opened(
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
    assert opened == [str(ours / "manifest.json")]
    assert (wanted["w"].data == -1).all()


def test_a_truncated_manifest_does_not_make_the_directory_a_stock_checkpoint(ours: Path) -> None:
    (ours / "manifest.json").unlink()
    with pytest.raises(CheckpointCorruptError, match=r"written by opt-checkpoint, but its manifest\.json is gone"):
        load({}, ours)


@pytest.mark.parametrize("value", [object(), lambda: 0], ids=["object", "lambda"])
def test_a_value_that_could_not_be_loaded_safely_is_refused_when_saving(tmp_path: Path, value: Any) -> None:
    with pytest.raises(CheckpointingException, match="could not be loaded again without running its pickle"):
        save({"x": value}, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []
