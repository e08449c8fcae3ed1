"""The `.metadata` pickle of torch.distributed.checkpoint, written for stock readers and read without running it.

Reading uses an unpickler that knows a short list of names and refuses every other, so a stranger's file cannot run
code. The one private name of torch's here, `_StorageInfo`, is pickled inside every `.metadata` and so cannot change.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from opt_checkpoint.boxes.box import Box
from opt_checkpoint.disk.index import (
    ByteRange,
    CheckpointIndex,
    Kind,
    StoredChunk,
    StoredFile,
    StoredTensor,
    check_file_name,
    check_index,
)
from opt_checkpoint.errors import CheckpointCorruptError, CheckpointingException
from opt_checkpoint.state.sharded import Shape

METADATA = ".metadata"
MEGATRON_MARK = "metadata.json"
MEGATRON_COMMON = "common.pt"


class _Placeholder:
    """Stands for a class of the reference's whose content we do not need; takes any state and does nothing."""

    def __init__(self, *args: object) -> None:
        """Accept what the pickle gives."""

    def __setstate__(self, state: object) -> None:
        """Forget it."""


_DCP = "torch.distributed.checkpoint.metadata"
_ALLOWED: Mapping[tuple[str, str], Any] = MappingProxyType(
    {
        (_DCP, "Metadata"): dcp.Metadata,
        (_DCP, "MetadataIndex"): dcp.MetadataIndex,
        (_DCP, "TensorStorageMetadata"): dcp.TensorStorageMetadata,
        (_DCP, "BytesStorageMetadata"): dcp.BytesStorageMetadata,
        (_DCP, "ChunkStorageMetadata"): dcp.ChunkStorageMetadata,
        (_DCP, "TensorProperties"): dcp.TensorProperties,
        (_DCP, "StorageMeta"): dcp.StorageMeta,
        (_DCP, "_MEM_FORMAT_ENCODING"): dcp._MEM_FORMAT_ENCODING,
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
        ("torch", "Size"): torch.Size,
        ("torch.serialization", "_get_layout"): lambda name: getattr(torch, name.removeprefix("torch.")),
        ("collections", "OrderedDict"): dict,
        ("pathlib", "PosixPath"): lambda *parts: "/".join(parts),  # where it was saved; only a text to us
        ("pathlib._local", "PosixPath"): lambda *parts: "/".join(parts),
        ("builtins", "set"): set,
        ("builtins", "list"): list,
        ("builtins", "dict"): dict,
    }
)
_PLACEHOLDERS = frozenset({"MCoreMetadata", "MCoreSavePlan"})


class _SafeUnpickler(pickle.Unpickler):
    """Knows the classes that a `.metadata` is made of, and refuses all others."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if name in _PLACEHOLDERS and module.startswith("megatron.core."):
            return dcp.Metadata if name == "MCoreMetadata" else _Placeholder
        if module == "torch" and isinstance(value := vars(torch).get(name), torch.dtype):
            return value
        raise CheckpointCorruptError(f"{METADATA} names {module}.{name}, which no checkpoint needs; nothing was run")


def read_dcp_index(path: Path) -> CheckpointIndex:
    """The index of a stock or reference directory.

    Args:
        path: the checkpoint's directory; it holds `.metadata`.

    Raises:
        CheckpointCorruptError: `.metadata` names classes it should not, or contradicts itself or the files.
        OSError: it cannot be read.
    """
    metadata = _unpickle((path / METADATA).read_bytes())
    places = _places(metadata)
    tensors, objects = {}, {}
    for key, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, dcp.TensorStorageMetadata):
            tensors[key] = _tensor_of(key, stored, places)
        else:
            objects[key] = _only_place(key, places)
    files = {place.file for place in places.values()}
    index = CheckpointIndex(
        path=path,
        kind=Kind.MEGATRON if (path / MEGATRON_MARK).exists() else Kind.DCP,
        tensors=tensors,
        objects=objects,
        files={name: StoredFile(size=_size(path, name)) for name in files},
        details={},
    )
    check_index(index)
    return index


def _unpickle(raw: bytes) -> dcp.Metadata:
    try:
        metadata = _SafeUnpickler(io.BytesIO(raw)).load()
    except CheckpointingException:
        raise
    except Exception as error:
        raise CheckpointCorruptError(f"{METADATA} is damaged: {error!r}") from error
    if not isinstance(metadata, dcp.Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise CheckpointCorruptError(f"{METADATA} holds a {type(metadata).__name__}, not the metadata of a checkpoint")
    return metadata


def _places(metadata: dcp.Metadata) -> dict[dcp.MetadataIndex, ByteRange]:
    places = {}
    for where, info in (metadata.storage_data or {}).items():
        check_file_name(info.relative_path)
        if info.__dict__.get("transform_descriptors"):
            raise CheckpointCorruptError(f"{where.fqn} was stored through transforms, which this version cannot undo")
        places[where] = ByteRange(file=info.relative_path, start=info.offset, nbytes=info.length, archive=True)
    return places


def _only_place(key: str, places: Mapping[dcp.MetadataIndex, ByteRange]) -> ByteRange:
    place = places.get(dcp.MetadataIndex(key))
    if place is None:
        raise CheckpointCorruptError(f"{METADATA} lists the object {key} and no place for it")
    return place


def _tensor_of(
    key: str, stored: dcp.TensorStorageMetadata, places: Mapping[dcp.MetadataIndex, ByteRange]
) -> StoredTensor:
    chunks = []
    for chunk in stored.chunks:
        box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        place = places.get(dcp.MetadataIndex(key, chunk.offsets))
        if place is None and box.numel:
            raise CheckpointCorruptError(f"{METADATA} lists chunk {box} of {key} and no place for it")
        if place is not None and box.numel:
            chunks.append(StoredChunk(box=box, place=place))
    return StoredTensor(shape=tuple(stored.size), dtype=stored.properties.dtype, chunks=tuple(chunks))


def _size(path: Path, name: str) -> int:
    try:
        return (path / name).stat().st_size
    except FileNotFoundError:
        raise CheckpointCorruptError(f"data file {path / name} is missing") from None


def encode_dcp_metadata(index: CheckpointIndex, archives: Mapping[tuple[str, Shape | None], ByteRange]) -> bytes:
    """The `.metadata` by which stock readers find everything in a checkpoint of ours.

    Args:
        index: the checkpoint.
        archives: the whole archive of every chunk by (key, offsets), and of every object by (unique key, None).
    """
    state: dict[str, Any] = {key: dcp.BytesStorageMetadata() for key in index.objects}
    for key, tensor in index.tensors.items():
        chunks = [dcp.ChunkStorageMetadata(torch.Size(c.box.offsets), torch.Size(c.box.sizes)) for c in tensor.chunks]
        state[key] = dcp.TensorStorageMetadata(dcp.TensorProperties(tensor.dtype), torch.Size(tensor.shape), chunks)
    storage = {
        dcp.MetadataIndex(key, offsets): _StorageInfo(p.file, p.start, p.nbytes)
        for (key, offsets), p in archives.items()
    }
    return pickle.dumps(dcp.Metadata(state, {}, storage), protocol=4)


def encode_megatron_mark() -> bytes:
    """The `metadata.json` by which Megatron-Core knows a directory as its own `torch_dist` format."""
    return json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}).encode()
