"""The `.metadata` pickle by which stock readers find everything in a checkpoint of ours, written from columns.

Making half a million objects of torch.distributed.checkpoint and pickling them takes half a minute. So the pickle is
written by hand: what repeats is put into the memo first. After that the records of all chunks with the same number of
axes are equally long, so that numpy fills in their integers at once.

The one private name of torch here, `_StorageInfo`, is pickled inside every `.metadata` and so cannot change.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Size
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from opt_checkpoint.disk.columns import Array
from opt_checkpoint.disk.dtype_names import dtype_from_name
from opt_checkpoint.disk.index import ByteRange
from opt_checkpoint.disk.stored_tensors import StoredTensors

_NEW, _OPEN, _CLOSE = b")\x81", b"}(", b"ub"  # an object without arguments; its state, a dict
_CLASSES = (
    dcp.Metadata,
    dcp.TensorStorageMetadata,
    dcp.BytesStorageMetadata,
    dcp.ChunkStorageMetadata,
    dcp.MetadataIndex,
    _StorageInfo,
    Size,
)
_INTEGER, _REFERENCE = b"\x8a\x08", b"j"  # LONG1 of eight bytes; LONG_BINGET of four


class _Memo:
    """Values that are written once and then referred to by number."""

    def __init__(self) -> None:
        self.written = io.BytesIO()
        self._numbers: dict[Any, int] = {}

    def number(self, value: Any) -> int:
        """The number of a value: a class, a text, or anything that pickles and hashes."""
        if value not in self._numbers:
            self._numbers[value] = len(self._numbers)
            self.written.write(_bare_pickle(value) + b"\x940")  # MEMOIZE, POP
        return self._numbers[value]

    def keep(self, name: Any, value: Any) -> None:
        """Write a value that does not hash, under a name that does."""
        self._numbers[name] = len(self._numbers)
        self.written.write(_bare_pickle(value) + b"\x940")

    def get(self, value: Any) -> bytes:
        """The opcode that pushes the value."""
        return _REFERENCE + struct.pack("<I", self.number(value))


def _bare_pickle(value: Any) -> bytes:
    """A value as opcodes that neither use nor fill the memo."""
    if isinstance(value, str):
        raw = value.encode("utf-8", "surrogatepass")
        return b"X" + struct.pack("<I", len(raw)) + raw
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, protocol=3)
    pickler.fast = True
    pickler.dump(value)
    return stream.getvalue()[2:-1]  # without PROTO and STOP


def _records(rows: int, template: Sequence[bytes | Array]) -> Array:
    """`rows` equally long records, a row of bytes each: constant bytes, and integers of 4 or 8 bytes from columns."""
    parts = [part if isinstance(part, bytes) else bytes(part.itemsize) for part in template]
    whole = np.tile(np.frombuffer(b"".join(parts), np.uint8), (rows, 1))
    position = 0
    for part, raw in zip(template, parts, strict=True):
        if not isinstance(part, bytes):
            whole[:, position : position + len(raw)] = np.ascontiguousarray(part).view(np.uint8).reshape(rows, len(raw))
        position += len(raw)
    return whole


def _size(memo: _Memo, rows: Array) -> list[bytes | Array]:
    """A `torch.Size` per row."""
    integers: list[bytes | Array] = [part for axis in range(rows.shape[1]) for part in (_INTEGER, rows[:, axis])]
    return [memo.get(Size) + b"(", *integers, b"t\x85R"]


def encode_dcp_metadata(
    tensors: StoredTensors,
    objects: Mapping[str, ByteRange],
    files: Sequence[str],
    archives: tuple[Array, Array],
    paths: Mapping[str, Sequence[str | int]],
) -> bytes:
    """The `.metadata` of a checkpoint.

    Args:
        tensors: the stored tensors.
        objects: the archive of every object and plain value, by its key.
        files: names of the data files, in the order of `tensors`' numbers.
        archives: where the archive of every chunk begins, and how long it is, in the order of `tensors`' columns.
        paths: where values are in the nested state, by key; others are at their key.
    """
    memo = _Memo()
    for kind in _CLASSES:
        memo.number(kind)
    for dtype in tensors.dtypes:
        memo.keep(("properties", dtype), dcp.TensorProperties(dtype_from_name(dtype)))
    keys, c = list(tensors), tensors.columns
    key_numbers = np.array([memo.number(key) for key in keys], "<u4")
    file_numbers = np.array([memo.number(file) for file in files] or [0], "<u4")[c["file"]]
    owner = np.repeat(np.arange(len(keys)), c["chunks"])
    state: list[bytes] = []
    storage: list[bytes] = []
    chunks: list[bytes] = [b""] * len(keys)
    for axes in np.unique(c["ndim"]).tolist():
        mine = np.flatnonzero(c["ndim"][owner] == axes)
        offsets = c["offsets"][mine, :axes]
        records = _chunk_records(memo, offsets, c["sizes"][mine, :axes])
        bounds = np.searchsorted(owner[mine], np.arange(len(keys) + 1)).tolist()
        for number in np.flatnonzero(c["ndim"] == axes).tolist():
            chunks[number] = records[bounds[number] : bounds[number + 1]].tobytes()
        where = key_numbers[owner[mine]], file_numbers[mine], archives[0][mine], archives[1][mine]
        storage.append(_storage_records(memo, offsets, *where).tobytes())
    for number, key in enumerate(keys):
        state.append(memo.get(key) + _tensor(memo, tensors, number, chunks[number]))
    for key, place in objects.items():
        state.append(memo.get(key) + memo.get(dcp.BytesStorageMetadata) + _NEW)
        storage.append(_object(memo, key, place))
    fields = b"".join(
        [
            memo.get("state_dict_metadata") + b"}(" + b"".join(state) + b"u",
            memo.get("planner_data") + b"}(" + b"".join(_path(memo, key, paths) for key in (*keys, *objects)) + b"u",
            memo.get("storage_data") + b"}(" + b"".join(storage) + b"u",
            memo.get("storage_meta") + b"N" + memo.get("version") + b"N",
        ]
    )
    body = memo.get(dcp.Metadata) + _NEW + _OPEN + fields + _CLOSE + b"."
    return b"\x80\x04" + memo.written.getvalue() + body


def _chunk_records(memo: _Memo, offsets: Array, sizes: Array) -> Array:
    head = memo.get(dcp.ChunkStorageMetadata) + _NEW + _OPEN + memo.get("offsets")
    return _records(len(offsets), [head, *_size(memo, offsets), memo.get("sizes"), *_size(memo, sizes), _CLOSE])


def _storage_records(memo: _Memo, offsets: Array, keys: Array, files: Array, starts: Array, nbytes: Array) -> Array:
    index: list[bytes | Array] = [
        memo.get(dcp.MetadataIndex) + _NEW + _OPEN + memo.get("fqn") + _REFERENCE,
        keys,
        memo.get("index") + b"N" + memo.get("offset"),
        *_size(memo, offsets),
        _CLOSE,
    ]
    info: list[bytes | Array] = [
        memo.get(_StorageInfo) + _NEW + _OPEN + memo.get("relative_path") + _REFERENCE,
        files,
        memo.get("offset") + _INTEGER,
        starts,
        memo.get("length") + _INTEGER,
        nbytes,
        _CLOSE,
    ]
    return _records(len(offsets), [*index, *info])


def _tensor(memo: _Memo, tensors: StoredTensors, number: int, chunks: bytes) -> bytes:
    c = tensors.columns
    axes = int(c["ndim"][number])
    size = b"".join(_INTEGER + struct.pack("<q", n) for n in c["shape"][number, :axes].tolist())
    return b"".join(
        [
            memo.get(dcp.TensorStorageMetadata) + _NEW + _OPEN,
            memo.get("properties") + memo.get(("properties", tensors.dtypes[c["dtype"][number]])),
            memo.get("size") + memo.get(Size) + b"(" + size + b"t\x85R",
            memo.get("chunks") + b"](" + chunks + b"e",
            _CLOSE,
        ]
    )


def _path(memo: _Memo, key: str, paths: Mapping[str, Sequence[str | int]]) -> bytes:
    parts = [memo.get(part) if isinstance(part, str) else _bare_pickle(part) for part in paths.get(key, (key,))]
    return memo.get(key) + b"(" + b"".join(parts) + b"t"


def _object(memo: _Memo, key: str, place: ByteRange) -> bytes:
    integer = [_INTEGER + struct.pack("<q", n) for n in (place.start, place.nbytes)]
    index = memo.get("fqn") + memo.get(key) + memo.get("index") + b"N"
    info = memo.get("relative_path") + memo.get(place.file) + memo.get("offset") + integer[0]
    return b"".join(
        [
            memo.get(dcp.MetadataIndex) + _NEW + _OPEN + index + _CLOSE,
            memo.get(_StorageInfo) + _NEW + _OPEN + info + memo.get("length") + integer[1] + _CLOSE,
        ]
    )
