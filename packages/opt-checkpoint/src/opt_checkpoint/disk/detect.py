"""Detects what is at a path: a checkpoint of opt-checkpoint, a stock or Megatron-Core directory, or nothing."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opt_checkpoint.disk.checked_values import CheckedValues
from opt_checkpoint.disk.checksums import crc32
from opt_checkpoint.disk.data_file import FILE_MARK, DataFiles, open_regular, read_small_file
from opt_checkpoint.disk.dcp_metadata import MEGATRON_COMMON, METADATA, read_dcp_index
from opt_checkpoint.disk.index import COMMON_KEY, CheckpointIndex, Kind
from opt_checkpoint.disk.manifest import MANIFEST, has_manifest, read_manifest
from opt_checkpoint.disk.object_target import COMMIT, committed_place
from opt_checkpoint.disk.read_region import FilePosition, Region, read_region
from opt_checkpoint.disk.stored_objects import SafeGlobals, load_object, loaded_whole
from opt_checkpoint.errors import CheckpointCorruptError, CheckpointNotFoundError
from opt_checkpoint.objects.path import AnyPath, Location, ObjectPath, location_of

_NOTHING = f"it has no {COMMIT} and no {MANIFEST}"
_STOCK = (
    f"it has a {METADATA}, as stock and Megatron-Core checkpoints do; download it: only file systems may hold these"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A checkpoint before its tensors are read."""

    index: CheckpointIndex
    common: Any


def read_index(path: AnyPath) -> CheckpointIndex:
    """The index of the checkpoint at a path.

    Without a manifest, `.metadata` is read, as stock torch and Megatron-Core write it.

    Args:
        path: the checkpoint's directory, or its place in an object store, where only our own checkpoints are read.

    Raises:
        CheckpointNotFoundError: there is none.
        CheckpointCorruptError: it is damaged.
    """
    where = location_of(path)
    if has_commit(where):
        return read_committed(where)
    if isinstance(where, ObjectPath):
        stock = (where / METADATA).exists()
        raise CheckpointNotFoundError(f"{where} is not a checkpoint of opt-checkpoint: {_STOCK if stock else _NOTHING}")
    if not where.is_dir():
        raise CheckpointNotFoundError(f"{where} does not exist, or is not a directory")
    if not (where / METADATA).exists():
        raise CheckpointNotFoundError(f"{where} is not a distributed checkpoint: no {MANIFEST} and no {METADATA} in it")
    if any(_is_our_data(p) for p in where.glob("*.distcp")):
        raise CheckpointCorruptError(f"{where} was written by opt-checkpoint, but its {MANIFEST} is gone")
    return read_dcp_index(where)


def has_commit(path: Location) -> bool:
    """Whether a checkpoint of opt-checkpoint was committed at a path; a damaged one counts too.

    Raises:
        OSError: the path cannot be read.
    """
    if not isinstance(path, ObjectPath):
        return has_manifest(path)
    return (path / COMMIT).exists() or (path / MANIFEST).exists()


def read_committed(path: Location) -> CheckpointIndex:
    """The index of a checkpoint of opt-checkpoint.

    Raises:
        CheckpointCorruptError: it is damaged.
        FileNotFoundError: none was committed at the path.
        OSError: it cannot be read.
    """
    if not isinstance(path, ObjectPath):
        return read_manifest(path)
    place = committed_place(path)
    if place is None:
        raise FileNotFoundError(errno.ENOENT, "no checkpoint was committed there", str(path))
    try:
        return read_manifest(place)
    except FileNotFoundError:
        raise CheckpointCorruptError(f"{path} was committed, but {place / MANIFEST} is gone") from None


def _is_our_data(path: Path) -> bool:
    with open(open_regular(path), "rb") as file:
        return file.read(len(FILE_MARK)) == FILE_MARK


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
    if index.kind is Kind.MEGATRON and isinstance(index.path, Path) and (index.path / MEGATRON_COMMON).exists():
        return load_object(read_small_file(index.path / MEGATRON_COMMON), allowed=safe_globals)
    return {}


def read_object(index: CheckpointIndex, unique_key: str, *, safe_globals: SafeGlobals = ()) -> Any:
    """One stored object; takes and returns values as `read_common`.

    Raises:
        CheckpointCorruptError: it is damaged, or would need code to be run.
    """
    place = index.objects[unique_key]
    with DataFiles(index) as files:
        raw = files[place.file].read(place.start, place.nbytes)
    if place.crc is not None and crc32(raw) != place.crc:
        raise CheckpointCorruptError(f"{index.path / place.file} is damaged: the object {unique_key} has changed")
    value = index.kind.unwrapped(load_object(raw, allowed=safe_globals))
    return loaded_whole(value, unique_key) if index.kind is Kind.OURS else value


def read_tensor(index: CheckpointIndex, key: str) -> Tensor:
    """One stored tensor of a checkpoint of opt-checkpoint, as a new CPU tensor; for small ones, without other ranks.

    Raises:
        CheckpointCorruptError: it is damaged.
    """
    stored = index.tensors[key]
    values = torch.empty(stored.shape, dtype=stored.dtype)
    with DataFiles(index) as files:
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
    wanted = list(keys)
    values: dict[bytes, Any] = {}
    loaded = {}
    with DataFiles(index) as files:
        for key in wanted:
            place = index.objects[key]
            raw = bytes(files[place.file].read(place.start, place.nbytes))
            if place.crc is not None and crc32(raw) != place.crc:
                raise CheckpointCorruptError(f"{index.path / place.file} is damaged: the object {key} has changed")
            if raw not in values:
                values[raw] = loaded_whole(index.kind.unwrapped(load_object(raw)), key)
            loaded[key] = values[raw]
    return loaded


def open_checkpoint(path: AnyPath, *, safe_globals: SafeGlobals = ()) -> Opened:
    """Index and common state of the checkpoint at a path; raises like `read_index` and `read_common`."""
    index = read_index(path)
    return Opened(index=index, common=read_common(index, safe_globals=safe_globals))
