"""Converts a checkpoint to a directory from which `torch.distributed.checkpoint.load` loads model and optimizer.

Tensors are not copied: the new directory has hard links to the data files, and its own `.metadata`, in which the
optimizer's states have the keys of `torch.distributed.checkpoint.state_dict` (`optim.state.<parameter>.<state>`).
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Size
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from opt_checkpoint.disk.dcp_metadata import METADATA, read_dcp_index
from opt_checkpoint.disk.detect import open_checkpoint
from opt_checkpoint.disk.index import COMMON_KEY, ByteRange, Kind, StoredTensor
from opt_checkpoint.errors import CheckpointExistsError, CheckpointValueError
from opt_checkpoint.run.save_load import PathLike
from opt_checkpoint.run.saved_optimizer import SavedOptimizer, find_optimizer
from opt_checkpoint.store import store_at
from opt_checkpoint.store.paths import local_path

_GROUPS_FILE = "optimizer.data"


def checkpoint_to_dcp(path: PathLike, folder: PathLike, *, at: Sequence[str] = ("optimizer",), name: str = "") -> None:
    """Write a directory for stock `dcp.load` with `{"model": model_state, "optim": optimizer_state}` of
    `get_state_dict`.

    Groups are stored both by number and flattened by parameter, for both forms of the optimizer's state dict.

    Args:
        path: a checkpoint of opt-checkpoint with `sharded_optimizer(...)` in its state.
        folder: the directory to write; on the file system of `path`, files are linked, else copied.
        at: the keys under which the optimizer is.
        name: the key of the optimizer in `folder`; "" for the same as in `path`.

    Raises:
        CheckpointExistsError: something is at `folder`.
        CheckpointKeyError: the checkpoint has no optimizer.
        CheckpointingException: `path` was not written by opt-checkpoint, or is in an object store.
    """
    source = local_path(path, "a checkpoint whose files are to be linked")
    opened, target = open_checkpoint(source), local_path(folder, "a directory for dcp.load")
    if opened.index.kind is not Kind.OURS:
        raise CheckpointValueError(
            f"{path} was written by {opened.index.kind.value}; only checkpoints of opt-checkpoint are converted"
        )
    if os.path.lexists(target):
        raise CheckpointExistsError(f"{target} exists; choose another folder")
    saved, archives = find_optimizer(opened, at), read_dcp_index(source, store_at(source).sizes())
    name = name or ".".join(at)
    keys = {key: f"{name}.state.{p}.{state}" for p, states in saved.keys.items() for state, key in states.items()}
    values = {key: place for key, place in archives.objects.items() if key != COMMON_KEY}
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".scratch-") as scratch:
        out = Path(scratch) / "whole"
        out.mkdir()
        files = {file: f"{number}.data" for number, file in enumerate(sorted(archives.files))}
        for file, link in files.items():
            try:
                os.link(source / file, out / link)
            except OSError:  # another file system, or one without links
                shutil.copyfile(source / file, out / link)
        tensors = {keys.get(key, key): tensor for key, tensor in archives.tensors.items()}
        objects = values | _write_values(out / _GROUPS_FILE, dict(_group_values(saved, name)))
        (out / METADATA).write_bytes(_metadata(tensors, objects, files))
        out.rename(target)


def _group_values(saved: SavedOptimizer, name: str) -> Iterator[tuple[str, Any]]:
    """Every field of every group by number and by parameter, and the non-tensor states."""
    for number, (group, members) in enumerate(zip(saved.groups, saved.names, strict=True)):
        for field, value in {**group, "params": list(members)}.items():
            yield f"{name}.param_groups.{number}.{field}", value
        for param in members:
            for field, value in group.items():
                yield f"{name}.param_groups.{param}.{field}", value
    for param, states in saved.plain_state.items():
        for state, value in states.items():
            yield f"{name}.state.{param}.{state}", value


def _write_values(file: Path, values: Mapping[str, Any]) -> dict[str, ByteRange]:
    """Write each value as an archive of `torch.save`; equal values are written once."""
    places: dict[str, ByteRange] = {}
    first: dict[bytes, ByteRange] = {}
    with file.open("wb") as out:
        for key, value in values.items():
            stream = io.BytesIO()
            torch.save(value, stream)
            raw = stream.getvalue()
            if raw not in first:
                first[raw] = ByteRange(file=file.name, start=out.tell(), nbytes=len(raw), archive=True)
                out.write(raw)
            places[key] = first[raw]
    return places


def _metadata(tensors: Mapping[str, StoredTensor], objects: Mapping[str, ByteRange], files: Mapping[str, str]) -> bytes:
    """The `.metadata` of these tensors and objects, in files with new names."""
    stored: dict[str, Any] = {key: dcp.BytesStorageMetadata() for key in objects}
    places = {dcp.MetadataIndex(key): place for key, place in objects.items()}
    for key, tensor in tensors.items():
        chunks = [dcp.ChunkStorageMetadata(Size(c.box.offsets), Size(c.box.sizes)) for c in tensor.chunks]
        stored[key] = dcp.TensorStorageMetadata(dcp.TensorProperties(tensor.dtype), Size(tensor.shape), chunks)
        places |= {dcp.MetadataIndex(key, Size(chunk.box.offsets)): chunk.place for chunk in tensor.chunks}
    storage = {index: _StorageInfo(files.get(p.file, p.file), p.start, p.nbytes) for index, p in places.items()}
    return pickle.dumps(dcp.Metadata(stored, planner_data={key: (key,) for key in stored}, storage_data=storage))
