"""Detects what is at a path: a checkpoint of opt-checkpoint, a stock or Megatron-Core directory, or nothing."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opt_checkpoint.disk.checksums import crc32
from opt_checkpoint.disk.data_file import FILE_MARK, CheckedValues, DataFiles
from opt_checkpoint.disk.dcp_metadata import MEGATRON_COMMON, METADATA, read_dcp_index
from opt_checkpoint.disk.index import COMMON_KEY, CheckpointIndex, Kind
from opt_checkpoint.disk.manifest import read_manifest
from opt_checkpoint.disk.read_region import FilePosition, Region, read_region
from opt_checkpoint.disk.stored_objects import SafeGlobals, load_object, loaded_whole
from opt_checkpoint.errors import CheckpointCorruptError, CheckpointNotFoundError
from opt_checkpoint.store import MANIFEST, AnyPath, Location, location_of, store_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A checkpoint before its tensors are read."""

    index: CheckpointIndex
    common: Any


def read_index(path: AnyPath) -> CheckpointIndex:
    """The index of the checkpoint at a path.

    Without a manifest, `.metadata` is read, as stock torch and Megatron-Core write it.

    Args:
        path: the checkpoint's directory, or its place in an object store.

    Raises:
        CheckpointNotFoundError: there is none.
        CheckpointCorruptError: it is damaged.
    """
    where = location_of(path)
    try:
        return read_committed(where)
    except FileNotFoundError:
        pass
    store = store_at(where)
    try:
        sizes = store.sizes()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointNotFoundError(f"{where} does not exist, or is not a directory") from None
    if METADATA not in sizes:
        raise CheckpointNotFoundError(f"{where} is not a distributed checkpoint: no {MANIFEST} and no {METADATA} in it")
    for name in [name for name in sizes if name.endswith(".distcp")]:
        start = bytearray(min(max(0, sizes[name]), len(FILE_MARK)))
        store.read_into(name, 0, memoryview(start))
        if start == FILE_MARK:
            raise CheckpointCorruptError(f"{where} was written by opt-checkpoint, but its {MANIFEST} is gone")
    return read_dcp_index(where, sizes)


def read_committed(path: Location) -> CheckpointIndex:
    """The index of a checkpoint of opt-checkpoint.

    Raises:
        CheckpointCorruptError: it is damaged.
        FileNotFoundError: none was committed at the path.
        OSError: it cannot be read.
    """
    store = store_at(path)
    folder = store.committed()
    if folder is None:
        raise FileNotFoundError(errno.ENOENT, "no checkpoint was committed there", str(path))
    try:
        return read_manifest(store.path(folder))
    except FileNotFoundError:
        raise CheckpointCorruptError(f"{path} was committed, but {store.path(folder) / MANIFEST} is gone") from None


def read_common(index: CheckpointIndex, *, safe_globals: SafeGlobals = ()) -> Any:
    """The common state: the plain values of the saved state, nested as before; empty if none were stored.

    Args:
        index: the checkpoint.
        safe_globals: classes and functions that may be used to load it, as for `torch.serialization.safe_globals`.

    Returns:
        The values, with None in place of tensors in lists, which are stored as tensors; `load` returns them. In a
        checkpoint that another program wrote, an object of any other class is a `NotLoaded`.

    Raises:
        CheckpointCorruptError: it is damaged, or would need code to be run.
    """
    if COMMON_KEY in index.objects:
        return read_object(index, COMMON_KEY, safe_globals=safe_globals)
    if index.kind is Kind.MEGATRON:
        try:
            return load_object(store_at(index.path).read(MEGATRON_COMMON), allowed=safe_globals)
        except FileNotFoundError:
            pass
    return {}


def read_object(index: CheckpointIndex, unique_key: str, *, safe_globals: SafeGlobals = ()) -> Any:
    """One stored object; takes and returns values as `read_common`.

    Raises:
        CheckpointCorruptError: it is damaged, or would need code to be run.
    """
    value = index.kind.unwrapped(load_object(_object_bytes(DataFiles(index), index, unique_key), allowed=safe_globals))
    return loaded_whole(value, unique_key) if index.kind is Kind.OURS else value


def read_tensor(index: CheckpointIndex, key: str) -> Tensor:
    """One stored tensor of a checkpoint of opt-checkpoint, as a new CPU tensor; for small ones, without other ranks.

    Raises:
        CheckpointCorruptError: it is damaged.
    """
    stored = index.tensors[key]
    values, files = torch.empty(stored.shape, dtype=stored.dtype), DataFiles(index)
    for chunk in stored.chunks:
        source = CheckedValues(files[chunk.place.file], chunk.place, key)
        region = chunk.region((0,) * len(stored.shape), chunk.box.sizes)
        target = Region(stored.shape, chunk.box.offsets, chunk.box.sizes).of_tensor(values)
        read_region(target, region, stored.dtype, FilePosition(source, chunk.place.start))
    return values


def read_objects(index: CheckpointIndex, keys: Iterable[str]) -> dict[str, Any]:
    """Read many stored objects by key, many of them equal, such as fields of parameter groups. See `read_object`.

    Raises:
        CheckpointCorruptError: one is damaged, or would need code to be run.
    """
    values, loaded, files = dict[bytes, Any](), {}, DataFiles(index)
    for key in keys:
        raw = _object_bytes(files, index, key)
        if raw not in values:
            values[raw] = loaded_whole(index.kind.unwrapped(load_object(raw)), key)
        loaded[key] = values[raw]
    return loaded


def _object_bytes(files: DataFiles, index: CheckpointIndex, unique_key: str) -> bytes:
    """The archive of a stored object, compared with its checksum."""
    place = index.objects[unique_key]
    raw = files[place.file].read(place.start, place.nbytes)
    if place.crc is not None and crc32(raw) != place.crc:
        raise CheckpointCorruptError(f"{index.path / place.file} is damaged: the object {unique_key} has changed")
    return raw


def open_checkpoint(path: AnyPath, *, safe_globals: SafeGlobals = ()) -> Opened:
    """Index and common state of the checkpoint at a path; raises like `read_index` and `read_common`."""
    index = read_index(path)
    return Opened(index=index, common=read_common(index, safe_globals=safe_globals))
