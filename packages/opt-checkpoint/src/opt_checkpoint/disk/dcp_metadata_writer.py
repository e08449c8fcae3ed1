"""Writes the `.metadata` pickle with which stock readers read a checkpoint of opt-checkpoint, from columns.

Creating half a million objects of torch.distributed.checkpoint and pickling them takes half a minute. The opcodes are
therefore written directly. Repeated values are put into the memo first. The records of all chunks with the same number
of axes then have the same length, so numpy fills in their integers all at once.

The only private name of torch used here, `_StorageInfo`, is in every `.metadata` file and therefore cannot change.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from torch import Size
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from opt_checkpoint.disk.columns import Array
from opt_checkpoint.disk.dtype_names import dtype_from_name
from opt_checkpoint.disk.index import ByteRange
from opt_checkpoint.disk.stored_tensors import StoredTensors

Buffer: TypeAlias = bytes | memoryview
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
_INTEGER, _LONG, _REFERENCE = b"J", b"\x8a\x08", b"j"  # BININT of four bytes; LONG1 of eight; LONG_BINGET of four
_SHORT_REFERENCE = b"h"  # BINGET of one byte
_MEMOIZED = b"\x940"  # MEMOIZE, POP
_TEXTS = (
    *("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version", "properties", "size"),
    *("chunks", "offsets", "sizes", "fqn", "index", "offset", "relative_path", "length"),
)


class _Memo:
    """Values that are written once and then referenced by number."""

    def __init__(self) -> None:
        self.written = io.BytesIO()
        self._numbers: dict[Any, int] = {}
        self._count = 0

    def number(self, value: Any) -> int:
        """The number of a value: a class, a text, or anything that pickles and hashes."""
        if value not in self._numbers:
            self.keep(value, value)
        return self._numbers[value]

    def keep(self, name: Any, value: Any) -> None:
        """Write a value that is not hashable, under a hashable name."""
        self._numbers[name] = self._count
        self._count += 1
        self.written.write(_bare_pickle(value) + _MEMOIZED)

    def texts(self, values: Sequence[bytes]) -> Array:
        """The numbers of many distinct strings, encoded as UTF-8."""
        lengths = np.fromiter(map(len, values), "<u4", len(values)).tobytes()
        self.written.write(
            b"".join(
                b"X%b%b%b" % (lengths[at : at + 4], raw, _MEMOIZED)
                for at, raw in zip(range(0, len(lengths), 4), values)
            )
        )
        first, self._count = self._count, self._count + len(values)
        return np.arange(first, self._count, dtype="<u4")

    def get(self, value: Any) -> bytes:
        """The opcode that pushes the value."""
        number = self.number(value)
        return _SHORT_REFERENCE + bytes([number]) if number < 256 else _REFERENCE + struct.pack("<I", number)


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
    """`rows` records of equal length, as rows of bytes: constant bytes, and integers of 4 or 8 bytes from columns."""
    parts = [part if isinstance(part, bytes) else bytes(part.itemsize) for part in template]
    joined = b"".join(parts)
    whole = np.empty((rows, len(joined)), np.uint8)
    whole[:] = np.frombuffer(joined, np.uint8)
    position = 0
    for part, raw in zip(template, parts, strict=True):
        if not isinstance(part, bytes):
            whole[:, position : position + len(raw)] = np.ascontiguousarray(part).view(np.uint8).reshape(rows, len(raw))
        position += len(raw)
    return whole


def _integers(columns: Array) -> list[bytes | Array]:
    """Opcodes that push the integers of a row, from the columns of an array of int64 that are not negative."""
    if int(columns.max(initial=0)) < 1 << 31:
        return [part for axis in range(columns.shape[1]) for part in (_INTEGER, columns[:, axis].astype("<i4"))]
    return [part for axis in range(columns.shape[1]) for part in (_LONG, columns[:, axis])]


def _size(memo: _Memo, rows: Array) -> list[bytes | Array]:
    """A `torch.Size` per row."""
    return [memo.get(Size) + b"(", *_integers(rows), b"t\x85R"]


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
        archives: start and size of the archive of every chunk, in the order of `tensors`' columns.
        paths: paths of values in the nested state, by key; a value without an entry is at its key.
    """
    memo = _Memo()
    for text in (*_CLASSES, *_TEXTS):
        memo.number(text)
    for dtype in tensors.dtypes:
        memo.keep(("properties", dtype), dcp.TensorProperties(dtype_from_name(dtype)))
    numbers = _Numbers(
        keys=memo.texts([key.encode("utf-8", "surrogatepass") for key in tensors]),
        files=memo.texts([name.encode() for name in files]),
        properties=np.array([memo.number(("properties", name)) for name in tensors.dtypes], "<u4"),
    )
    state, storage = _tensors(memo, tensors, numbers, archives)
    for key, place in objects.items():
        state.append(memo.get(key) + memo.get(dcp.BytesStorageMetadata) + _NEW)
        storage.append(_object(memo, key, place))
    data = _paths(memo, tensors, numbers, paths) + b"".join(_path(memo, memo.get(key), (key,)) for key in objects)
    body = [
        *(memo.get(dcp.Metadata) + _NEW + _OPEN, memo.get("state_dict_metadata") + b"}(", *state, b"u"),
        *(memo.get("planner_data") + b"}(", data, b"u", memo.get("storage_data") + b"}(", *storage, b"u"),
        memo.get("storage_meta") + b"N" + memo.get("version") + b"N" + _CLOSE + b".",
    ]
    return b"".join([b"\x80\x04", memo.written.getvalue(), *body])


class _Numbers(NamedTuple):
    """Memo numbers of the keys (in the order of tensors), of the files, and of the properties of each dtype."""

    keys: Array
    files: Array
    properties: Array


def _tensors(
    memo: _Memo, tensors: StoredTensors, numbers: _Numbers, archives: tuple[Array, Array]
) -> tuple[list[Buffer], list[Buffer]]:
    """The entries of all tensors in `state_dict_metadata`, and of all chunks in `storage_data`."""
    c = tensors.columns
    owner = np.repeat(np.arange(len(c["ndim"])), c["chunks"])
    state: list[Buffer] = []
    storage: list[Buffer] = []
    for axes in np.unique(c["ndim"]).tolist():
        of_axes, own = np.flatnonzero(c["ndim"] == axes), np.flatnonzero(c["ndim"][owner] == axes)
        offsets, sizes = c["offsets"][own, :axes], c["sizes"][own, :axes]
        state += _interleaved(
            _tensor_records(memo, tensors, numbers, of_axes, axes),
            _chunk_records(memo, offsets, sizes),
            np.searchsorted(owner[own], np.append(of_axes, len(c["ndim"]))).tolist(),
        )
        places = np.stack([archives[0][own], archives[1][own]], axis=1)
        storage.append(
            _storage_records(memo, offsets, numbers.keys[owner[own]], numbers.files[c["file"][own]], places).data
        )
    return state, storage


def _interleaved(heads: Array, chunks: Array, bounds: Sequence[int]) -> Iterator[Buffer]:
    """Each head, followed by its chunks and the closing opcodes."""
    head, chunk = heads.shape[1], chunks.shape[1]
    all_heads, all_chunks = (memoryview(array.reshape(-1).data) for array in (heads, chunks))
    for number, (first, last) in enumerate(pairwise(bounds)):
        yield all_heads[number * head : (number + 1) * head]
        yield all_chunks[first * chunk : last * chunk]
        yield b"e" + _CLOSE


def _tensor_records(memo: _Memo, tensors: StoredTensors, numbers: _Numbers, rows: Array, axes: int) -> Array:
    """Key and `TensorStorageMetadata` up to its list of chunks."""
    c = tensors.columns
    return _records(
        len(rows),
        [
            _REFERENCE,
            numbers.keys[rows],
            memo.get(dcp.TensorStorageMetadata) + _NEW + _OPEN + memo.get("properties") + _REFERENCE,
            numbers.properties[c["dtype"][rows]],
            memo.get("size"),
            *_size(memo, c["shape"][rows, :axes]),
            memo.get("chunks") + b"](",
        ],
    )


def _chunk_records(memo: _Memo, offsets: Array, sizes: Array) -> Array:
    head = memo.get(dcp.ChunkStorageMetadata) + _NEW + _OPEN + memo.get("offsets")
    return _records(len(offsets), [head, *_size(memo, offsets), memo.get("sizes"), *_size(memo, sizes), _CLOSE])


def _storage_records(memo: _Memo, offsets: Array, keys: Array, files: Array, places: Array) -> Array:
    index: list[bytes | Array] = [
        memo.get(dcp.MetadataIndex) + _NEW + _OPEN + memo.get("fqn") + _REFERENCE,
        keys,
        memo.get("index") + b"N" + memo.get("offset"),
        *_size(memo, offsets),
        _CLOSE,
    ]
    start, nbytes = _integers(places[:, :1]), _integers(places[:, 1:])
    info: list[bytes | Array] = [
        memo.get(_StorageInfo) + _NEW + _OPEN + memo.get("relative_path") + _REFERENCE,
        files,
        memo.get("offset"),
        *start,
        memo.get("length"),
        *nbytes,
        _CLOSE,
    ]
    return _records(len(offsets), [*index, *info])


def _paths(memo: _Memo, tensors: StoredTensors, numbers: _Numbers, paths: Mapping[str, Sequence[str | int]]) -> bytes:
    """Key and path of every tensor. The path of most tensors is just the key."""
    is_own = np.fromiter((key not in paths for key in tensors), bool, len(tensors))
    plain = numbers.keys[is_own]
    records = _records(len(plain), [_REFERENCE, plain, b"(" + _REFERENCE, plain, b"t"]).tobytes()
    others = zip(numbers.keys[~is_own].tolist(), (key for key in tensors if key in paths))
    return records + b"".join(_path(memo, _REFERENCE + struct.pack("<I", number), paths[key]) for number, key in others)


def _path(memo: _Memo, key: bytes, path: Sequence[str | int]) -> bytes:
    parts = [memo.get(part) if isinstance(part, str) else _bare_pickle(part) for part in path]
    return key + b"(" + b"".join(parts) + b"t"


def _object(memo: _Memo, key: str, place: ByteRange) -> bytes:
    integer = [_LONG + struct.pack("<q", n) for n in (place.start, place.nbytes)]
    index = memo.get("fqn") + memo.get(key) + memo.get("index") + b"N"
    info = memo.get("relative_path") + memo.get(place.file) + memo.get("offset") + integer[0]
    return b"".join(
        [
            memo.get(dcp.MetadataIndex) + _NEW + _OPEN + index + _CLOSE,
            memo.get(_StorageInfo) + _NEW + _OPEN + info + memo.get("length") + integer[1] + _CLOSE,
        ]
    )
