"""Stored bytes: archives that torch reads, checksums, places in archives of others, stored objects."""

import argparse
import enum
import io
import os
import resource
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_ranks import save_as_ranks
from states import state_at

from opt_checkpoint import CheckpointCorruptError, NotLoaded, load, read_index, save
from opt_checkpoint.disk.archives import find_values, load_object, loaded_whole, not_loaded_in
from opt_checkpoint.disk.data_file import bytes_view
from opt_checkpoint.disk.data_file_writer import frame_tensor
from opt_checkpoint.disk.index import ByteRange
from opt_checkpoint.disk.manifest import (
    decode_columns,
    decode_manifest,
    decode_paths,
    encode_columns,
    encode_manifest,
    read_manifest,
)
from opt_checkpoint.state.tensors import _BY_NAME, DTYPE_NAMES, dtype_from_name

SHAPES = [(), (0,), (1,), (63,), (2, 5), (4, 1, 3), (3, 0, 2), (1025,)]


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Any bit pattern, NaNs included; booleans are 0 or 1."""
    numel = torch.Size(shape).numel()
    raw = torch.randint(0, 256 if dtype != torch.bool else 2, (numel * dtype.itemsize,), dtype=torch.uint8)
    return raw.view(dtype).view(shape) if numel else torch.empty(shape, dtype=dtype)


@pytest.mark.parametrize("name", _BY_NAME)
def test_every_dtype_and_shape_is_an_archive_that_torch_loads(name: str) -> None:
    dtype = dtype_from_name(name)
    assert DTYPE_NAMES[dtype] == name
    for shape in SHAPES:
        tensor = random_bits(shape, dtype)
        values = bytes(bytes_view(tensor))
        raw = values.join(frame_tensor(dtype, shape))
        loaded = torch.load(io.BytesIO(raw), weights_only=True)
        assert (loaded.dtype, tuple(loaded.shape), bytes(bytes_view(loaded))) == (dtype, shape, values)
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            assert archive.getinfo("archive/data/0").file_size == len(values)


def test_archives_above_4_gb_are_read_by_zip_tools_and_torch(tmp_path: Path) -> None:
    numel = (1 << 30) + 5
    nbytes = 4 * numel
    path = tmp_path / "large"
    with path.open("wb") as file:
        before, after = frame_tensor(torch.float32, (numel,))
        file.write(before)
        file.seek(nbytes, os.SEEK_CUR)
        file.write(after)
    with zipfile.ZipFile(path) as archive:
        assert archive.getinfo("archive/data/0").file_size == nbytes
    assert torch.load(path, weights_only=True, mmap=True).shape == (numel,)


def archived(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def found(raw: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> ByteRange | None:
    files: Any = SimpleNamespace(read=lambda place: raw[place.start - 6 : place.stop - 6])
    return find_values(files, ByteRange(file="f", start=6, nbytes=len(raw), archive=True), dtype, shape)


def test_contiguous_values_in_torchs_archives_are_found_unloaded() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64):
        tensor = random_bits((5, 3), dtype)
        place = found(raw := archived(tensor), dtype, (5, 3))
        assert place is not None
        assert raw[place.start - 6 : place.start - 6 + place.nbytes] == bytes(bytes_view(tensor)), dtype
    whole = torch.arange(15.0).view(5, 3)
    for view in (whole.t(), whole[1:], whole[:, :2]):
        assert found(archived(view), torch.float32, tuple(view.shape)) is None


def test_an_archive_of_something_else_is_refused() -> None:
    raw = archived(torch.zeros(3))
    with pytest.raises(CheckpointCorruptError, match="the index says"):
        found(raw, torch.float32, (4,))
    with pytest.raises(CheckpointCorruptError, match="is damaged"):
        found(raw[:-30], torch.float32, (3,))


def test_a_byte_order_that_unpacks_to_much_is_not_unpacked() -> None:
    raw = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archived(torch.zeros(3)))) as old, zipfile.ZipFile(raw, "w") as new:
        for name in old.namelist():
            is_order = name.endswith("/byteorder")
            kind = zipfile.ZIP_DEFLATED if is_order else zipfile.ZIP_STORED
            new.writestr(name, bytes(256 << 20) if is_order else old.read(name), kind, 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert found(raw.getvalue(), torch.float32, (3,)) is None
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB


def test_a_manifest_reads_back_as_it_was_written(tmp_path: Path) -> None:
    save_as_ranks([state_at(1, rank, 3) for rank in range(3)], tmp_path / "x")
    index = read_manifest(tmp_path / "x")
    raw = encode_manifest(index)
    assert decode_manifest(tmp_path / "x", raw) == index
    header, columns = decode_columns(raw, "manifest")
    columns["column_of_the_future"] = columns["dtype"]
    again = encode_columns({**header, "field_of_the_future": [1]}, columns)
    assert decode_manifest(tmp_path / "x", again) == index
    with pytest.raises(CheckpointCorruptError, match="has format 3; this version of opt-checkpoint reads 2"):
        decode_manifest(tmp_path / "x", raw.replace(b"manifest 2", b"manifest 3", 1))


def test_a_file_of_negative_size_is_refused(tmp_path: Path) -> None:
    save({"w": torch.arange(6.0)}, tmp_path / "x")
    header, columns = decode_columns((tmp_path / "x" / "manifest.bin").read_bytes(), "manifest")
    header["files"].append(["other", -1, 0])
    with pytest.raises(CheckpointCorruptError, match="other is listed with a size of -1 bytes"):
        decode_manifest(tmp_path / "x", encode_columns(header, columns))


def test_a_manifest_with_any_byte_changed_is_damaged(tmp_path: Path) -> None:
    save({"w": torch.arange(6.0)}, tmp_path / "x")
    raw = (tmp_path / "x" / "manifest.bin").read_bytes()
    for at in range(len(raw)):
        changed = raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]
        with pytest.raises(CheckpointCorruptError, match=r"its checksum is wrong|has format 3"):
            decode_manifest(tmp_path / "x", changed)


def test_paths_come_back_from_a_manifest(tmp_path: Path) -> None:
    """With integers, booleans, dots, and numbers that are text."""
    inner = {0: {"b": torch.ones(1)}, "0": {"c": torch.ones(2)}, "0.x": torch.ones(2), "l": [[torch.ones(3)]]}
    state = {
        "a": inner,
        True: {7: torch.ones(4)},
        "x.y": {"z": torch.ones(1)},
        -1: {"ü": torch.ones(1)},
        "": torch.ones(1),
    }
    save(state, tmp_path / "x")
    paths = {("a", 0, "b"), ("a", "0", "c"), ("a", "0.x"), (True, 7), ("x.y", "z"), (-1, "ü"), ("",)}
    found = {tuple(path) for path in read_index(tmp_path / "x").details["paths"].values()}
    assert {tuple(map(repr, path)) for path in paths} <= {tuple(map(repr, path)) for path in found}
    assert load({"a": None}, tmp_path / "x").state["a"].keys() == inner.keys()
    assert load({"": torch.zeros(1)}, tmp_path / "x").state[""].item() == 1


def test_paths_that_do_not_fit_their_keys_are_refused() -> None:
    for counts, lengths in (([1], []), ([2], [2, 2, 2]), ([1, 0], [6]), ([2], [4, 2]), ([2], [3, 2]), ([1], [4])):
        columns = {"path_parts": np.array(counts, "<u4"), "path_lengths": np.array(lengths, "<u4")}
        with pytest.raises(CheckpointCorruptError, match="contradicts itself"):
            decode_paths(["a.b"], columns)


class Backend:
    """Of the writing script, and not known where it is read."""


class Mode(enum.Enum):
    FAST = 1


def test_an_object_holding_an_unknown_class_is_incomplete() -> None:
    """Importing megatron.core makes argparse.Namespace loadable everywhere; `convert` then failed on the placeholder of
    an enum in it, and `load` returned the placeholder to the caller."""
    raw = archived({"args": argparse.Namespace(lr=0.1, backend=Backend()), "mode": Mode.FAST, "iteration": 3})
    name = f"{Backend.__module__}.Backend"
    args = argparse.Namespace(lr=0.1, backend=NotLoaded(name))
    assert load_object(raw, allowed=[Mode, argparse.Namespace]) == {"args": args, "mode": Mode.FAST, "iteration": 3}
    with torch.serialization.safe_globals([argparse.Namespace]):
        loaded = load_object(raw)
    assert loaded["args"] == args
    assert set(not_loaded_in(loaded)) == {name, f"{Mode.__module__}.Mode"}
    with pytest.raises(CheckpointCorruptError, match="cannot be loaded safely"):
        loaded_whole(args, "args")


def test_an_object_whose_parts_are_shared_is_searched_once() -> None:
    """61 nested lists, each twice in the next, took 2^60 steps."""
    nested: list[Any] = [Backend()]
    for _ in range(60):
        nested = [nested, nested]
    (name,) = not_loaded_in(load_object(archived(nested)))
    assert name.endswith(".Backend")
