"""The `.metadata` that is written by hand says what torch.distributed.checkpoint's own classes would say."""

import io
import pickle
import pickletools
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_ranks import save_as_ranks
from states import state_at
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from opt_checkpoint import ShardedObject, ShardedTensor, read_index, save, sharded_like
from opt_checkpoint.disk.data_file_writer import pickle_tensor
from opt_checkpoint.disk.dcp_metadata_writer import encode_dcp_metadata
from opt_checkpoint.disk.foreign import read_dcp_index
from opt_checkpoint.disk.index import PIECE_BYTES, StoredFile, StoredTensors
from opt_checkpoint.store import store_at

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn)


def state_of(rank: int) -> dict[str, Any]:
    """Tensors of no to four axes, of several dtypes, of several chunks; objects; keys that are not plain words."""
    shapes: list[tuple[int, ...]] = [(), (4,), (2, 6), (4, 1, 3), (2, 2, 2, 2)]
    state: dict[str, Any] = {}
    for shape in shapes:
        for dtype in DTYPES:
            key = f"{dtype} {shape}"
            values = torch.ones(shape, dtype=dtype)
            if shape:
                state[key] = ShardedTensor.from_rank_offsets(key, values, (0, rank, 2))
            else:
                state[key] = sharded_like(key, values, replica_id=rank)
    state["odd"] = sharded_like("schlüssel/\n'\"€", torch.zeros(3), replica_id=rank)
    state["none"] = sharded_like("none", torch.zeros(0, 3), replica_id=rank)
    state["rng"] = ShardedObject("data/position", {"rank": rank}, (2,), (rank,))
    return {**state, "nested": [{"w": state_at(1, rank, 2)["w"], "lr": 0.5}]}


def expected(path: Path) -> dcp.Metadata:
    """The same made with the classes of DCP, from the manifest and the zip archives around the values."""
    index = read_index(path)
    state: dict[str, Any] = {key: dcp.BytesStorageMetadata() for key in index.objects}
    for key, tensor in index.tensors.items():
        chunks = [dcp.ChunkStorageMetadata(torch.Size(c.box.offsets), torch.Size(c.box.sizes)) for c in tensor.chunks]
        state[key] = dcp.TensorStorageMetadata(dcp.TensorProperties(tensor.dtype), torch.Size(tensor.shape), chunks)
    storage = {dcp.MetadataIndex(k): _StorageInfo(p.file, p.start, p.nbytes) for k, p in index.objects.items()}
    for key, tensor in index.tensors.items():
        for chunk in tensor.chunks:
            start, stop = archive_around(path / chunk.place.file, chunk.place.start, chunk.place.nbytes)
            storage[dcp.MetadataIndex(key, chunk.box.offsets)] = _StorageInfo(chunk.place.file, start, stop - start)
    paths = {key: tuple(path) for key, path in index.details["paths"].items()}
    state["nested.0.lr"] = dcp.BytesStorageMetadata()  # a plain value, for stock readers
    return dcp.Metadata(state, {key: paths.get(key, (key,)) for key in state}, storage)


def archive_around(file: Path, start: int, nbytes: int) -> tuple[int, int]:
    """Where the zip archive that holds the values begins, with its entry `data.pkl`, and ends."""
    raw = file.read_bytes()
    return raw.rindex(b"archive/data.pkl", 0, start) - 30, raw.index(b"PK\x05\x06", start + nbytes) + 22


def test_it_equals_what_the_classes_of_dcp_pickle(tmp_path: Path) -> None:
    save_as_ranks([state_of(rank) for rank in range(2)], tmp_path / "x")
    raw = (tmp_path / "x" / ".metadata").read_bytes()
    pickletools.dis(raw, out=io.StringIO())
    found = pickle.loads(raw)
    wanted = expected(tmp_path / "x")
    assert found.state_dict_metadata == wanted.state_dict_metadata
    plain = {index: place for index, place in found.storage_data.items() if index not in wanted.storage_data}
    assert {index.fqn for index in plain} == {"nested.0.lr"}
    assert found.storage_data == {**wanted.storage_data, **plain}
    assert found.planner_data == wanted.planner_data
    assert found.planner_data.keys() == found.state_dict_metadata.keys()
    assert found.storage_meta is None
    index = read_index(tmp_path / "x")
    foreign = read_dcp_index(tmp_path / "x", store_at(tmp_path / "x").sizes())
    assert foreign.objects.keys() - {"nested.0.lr"} == index.objects.keys()
    ours, theirs = ({k: (t.shape, t.dtype) for k, t in of.tensors.items()} for of in (index, foreign))
    assert ours == theirs


def test_states_without_tensors_or_objects_have_metadata_too(tmp_path: Path) -> None:
    for tensors in (0, 1):
        path = tmp_path / str(tensors)
        save({str(i): sharded_like(str(i), torch.ones(2)) for i in range(tensors)}, path)
        assert len(pickle.loads((path / ".metadata").read_bytes()).state_dict_metadata) == tensors + 1


class Part(StrEnum):
    MODEL = "model"


class Stage(IntEnum):
    FIRST = 1


def test_paths_are_plain_text_and_numbers(tmp_path: Path) -> None:
    """Keys of a user's classes are not imported by readers, and True is not 1."""
    state = {Part.MODEL: {"w": torch.ones(2)}, "a": {Stage.FIRST: torch.ones(2)}, "b": {True: torch.ones(2)}}
    save(state, tmp_path / "x")
    raw = (tmp_path / "x" / ".metadata").read_bytes()
    assert __name__.encode() not in raw
    paths = pickle.loads(raw).planner_data.values()
    assert {"('model', 'w')", "('a', 1)", "('b', True)"} <= set(map(repr, paths))


@pytest.mark.parametrize("numel", [(1 << 31) - 1, 1 << 31, (1 << 40) + 3])
def test_large_counts_are_pickled_as_they_are(numel: int) -> None:
    pickled = pickle_tensor(torch.float32, (3, numel))
    assert {3 * numel, 3, numel} <= {n for _, n, _ in pickletools.genops(pickled) if type(n) is int}
    rows = {"sizes": [[numel], [1]], "offsets": [[0], [numel]]}
    half = -(-numel // PIECE_BYTES)
    columns = {name: np.array(row, "<i8") for name, row in {**rows, "start": [64, 64], "chunks": [2]}.items()}
    columns |= {"keys": np.frombuffer(b"w", "|u1"), "key_bytes": np.array([1], "<u4"), "file": np.zeros(2, "<u4")}
    columns |= {"dtype": np.zeros(1, "|u1"), "ndim": np.ones(1, "|u1"), "shape": np.array([[numel + 1]], "<i8")}
    columns["sums"] = np.zeros(half + 1, "<u4")
    files = {"__0_0.distcp": StoredFile(size=numel + 99, crc=0)}
    archives = np.array([[0, numel + 9], [numel + 9, 5]], "<i8")
    raw = encode_dcp_metadata(StoredTensors(columns, ("bool",), files), {}, files, archives, {})
    found = pickle.loads(raw)
    (stored,) = found.state_dict_metadata.values()
    assert stored.size == (numel + 1,)
    assert [(*c.offsets, *c.sizes) for c in stored.chunks] == [(0, numel), (numel, 1)]
    assert {(i.offset[0], p.offset, p.length) for i, p in found.storage_data.items()} == {
        (0, 0, numel + 9),
        (numel, numel + 9, 5),
    }
