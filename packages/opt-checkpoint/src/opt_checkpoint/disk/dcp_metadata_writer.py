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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from torch import Size
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from opt_checkpoint.boxes import Array
from opt_checkpoint.disk.index import ByteRange, StoredTensors
from opt_checkpoint.state.tensors import dtype_from_name

Buffer: TypeAlias = bytes | memoryview
Template: TypeAlias = list[bytes | Array]  # of records of equal length: constants, and a column of integers each
_NEW = b")\x81"  # an object without arguments
_OPEN = b"}("  # its state, a dict
_CLOSE = b"ub"
_CLASSES = (
    dcp.Metadata,
    dcp.TensorStorageMetadata,
    dcp.BytesStorageMetadata,
    dcp.ChunkStorageMetadata,
    dcp.MetadataIndex,
    _StorageInfo,
    Size,
)
_END_OF_TENSOR = b"e" + _CLOSE
_INTEGER = b"J"  # BININT, of four bytes
_LONG = b"\x8a\x08"  # LONG1, of eight
_REFERENCE = b"j"  # LONG_BINGET, of four
_SHORT_REFERENCE = b"h"  # BINGET of one byte
_MEMOIZED = b"\x940"  # MEMOIZE, POP
_TEXTS = (
    "state_dict_metadata",
    "planner_data",
    "storage_data",
    "storage_meta",
    "version",
    "properties",
    "size",
    "chunks",
    "offsets",
    "sizes",
    "fqn",
    "index",
    "offset",
    "relative_path",
    "length",
)


@dataclass
class _Memo:
    """Values that are written once, in front, and then referenced by number."""

    written: io.BytesIO = field(default_factory=io.BytesIO)
    _numbers: dict[Any, int] = field(default_factory=dict)
    _count: int = 0

    def number(self, value: Any, name: Any = None) -> int:
        """Return the number of a value that pickles: a class, a text; under a name if it does not hash."""
        name = (type(value), value) if name is None else name  # True is equal to 1
        if name not in self._numbers:
            self._numbers[name] = self._count
            self._count += 1
            stream = io.BytesIO()
            pickler = pickle.Pickler(stream, protocol=3)
            pickler.fast = True  # neither uses nor fills the memo
            pickler.dump(value)
            self.written.write(stream.getvalue()[2:-1] + _MEMOIZED)  # without PROTO and STOP
        return self._numbers[name]

    def texts(self, values: Iterable[bytes]) -> Array:
        """Return the numbers of many distinct strings, encoded as UTF-8."""
        texts = [b"X%b%b%b" % (len(raw).to_bytes(4, "little"), raw, _MEMOIZED) for raw in values]
        self.written.write(b"".join(texts))
        first = self._count
        self._count = self._count + len(texts)
        return np.arange(first, self._count, dtype="<u4")

    def get(self, value: Any) -> bytes:
        """Return the opcode that pushes the value."""
        number = self.number(value)
        if number < 256:
            return _SHORT_REFERENCE + bytes([number])
        return _REFERENCE + struct.pack("<I", number)

    def new(self, kind: type) -> bytes:
        """Return the opcodes that push a new object of a class, and begin its state."""
        return self.get(kind) + _NEW + _OPEN

    def shapes(self, rows: Array) -> Template:
        """Return a `torch.Size` per row."""
        return [self.get(Size) + b"(", *_integers(rows), b"t\x85R"]


def _integers(columns: Array) -> Template:
    """Opcodes that push the integers of a row, from the columns of an array of int64 that are not negative."""
    is_short = int(columns.max(initial=0)) < 1 << 31
    if is_short:
        opcode = _INTEGER
        dtype = "<i4"
    else:
        opcode = _LONG
        dtype = "<i8"
    return [part for column in columns.T for part in (opcode, column.astype(dtype))]


def _records(rows: int, template: Template) -> Array:
    """`rows` records of equal length, as rows of bytes: constant bytes, and integers of 4 or 8 bytes from columns."""
    columns = []
    for part in template:
        if isinstance(part, bytes):
            columns.append(np.tile(np.frombuffer(part, np.uint8), (rows, 1)))
        else:
            columns.append(part.view(np.uint8).reshape(rows, part.itemsize))
    return np.concatenate(columns, axis=1)


def encode_dcp_metadata(
    tensors: StoredTensors,
    objects: Mapping[str, ByteRange],
    files: Iterable[str],
    archives: Array,
    paths: Mapping[str, Sequence[str | int]],
) -> bytes:
    """Return the `.metadata` of a checkpoint.

    Args:
        tensors: the stored tensors.
        objects: the archive of every object and plain value, by its key.
        files: names of the data files, in the order of `tensors`' numbers.
        archives: (chunks, 2) start and size of the archive of every chunk, in the order of `tensors`' columns.
        paths: paths of values in the nested state, by key; a value without an entry is at its key.
    """
    memo = _Memo()
    c = tensors.columns
    for constant in (*_CLASSES, *_TEXTS):
        memo.number(constant)
    numbers = []
    for name in tensors.dtypes:
        numbers.append(memo.number(dcp.TensorProperties(dtype_from_name(name)), ("properties", name)))
    properties = np.array(numbers, "<u4")  # (dtypes,)
    keys = memo.texts(key.encode("utf-8", "surrogatepass") for key in tensors)
    file_numbers = memo.texts(name.encode() for name in files)
    state = list[Buffer]()
    storage = list[Buffer]()
    for axes in np.unique(c["ndim"]).tolist():  # their records have equal lengths
        at = np.flatnonzero(c["ndim"] == axes)  # the tensors with so many axes
        chunks = np.flatnonzero(c["ndim"][tensors.owner] == axes)  # their chunks
        offsets = c["offsets"][chunks, :axes]
        sizes = c["sizes"][chunks, :axes]
        head: Template = [
            _REFERENCE,
            keys[at],
            memo.new(dcp.TensorStorageMetadata) + memo.get("properties") + _REFERENCE,
            properties[c["dtype"][at]],
        ]
        shapes = memo.shapes(c["shape"][at, :axes])
        head += [memo.get("size"), *shapes, memo.get("chunks") + b"]("]
        box: Template = [memo.new(dcp.ChunkStorageMetadata) + memo.get("offsets"), *memo.shapes(offsets)]
        box += [memo.get("sizes"), *memo.shapes(sizes), _CLOSE]
        heads = _records(len(at), head)  # (tensors, bytes of a record)
        boxes = _records(len(chunks), box)  # (chunks, bytes of a record)
        bounds = np.append(0, np.cumsum(c["chunks"][at])).tolist()  # of each tensor's chunks, in `boxes`
        for row, (first, last) in enumerate(pairwise(bounds)):
            state += [heads[row].data, boxes[first:last].reshape(-1).data, _END_OF_TENSOR]
        chunk_keys = keys[tensors.owner[chunks]]
        chunk_files = file_numbers[c["file"][chunks]]
        template = _stored_at(memo, chunk_keys, chunk_files, archives[chunks], offsets)
        storage.append(_records(len(chunks), template).reshape(-1).data)
    for key, location in objects.items():
        state.append(memo.get(key) + memo.get(dcp.BytesStorageMetadata) + _NEW)
        number = np.array([memo.number(key)], "<u4")
        file = np.array([memo.number(location.file)], "<u4")
        template = _stored_at(memo, number, file, np.array([[location.start, location.nbytes]]))
        storage.append(_records(1, template).reshape(-1).data)
    # Key and path of every tensor and object. The path of most is just the key.
    is_plain = np.fromiter((key not in paths for key in tensors), bool, len(tensors))
    plain = keys[is_plain]
    template = [_REFERENCE, plain, b"(" + _REFERENCE, plain, b"t"]
    planner: list[Buffer] = [_records(len(plain), template).tobytes()]
    for position, key in zip(keys.tolist(), tensors):
        if key in paths:
            parts = b"".join(memo.get(_plain(part)) for part in paths[key])
            planner.append(_REFERENCE + struct.pack("<I", position) + b"(" + parts + b"t")
    planner += [memo.get(key) + b"(" + memo.get(key) + b"t" for key in objects]
    body: list[Buffer] = [memo.new(dcp.Metadata)]
    for name, items in (("state_dict_metadata", state), ("planner_data", planner), ("storage_data", storage)):
        body += [memo.get(name), b"}(", *items, b"u"]
    body += [memo.get("storage_meta"), b"N", memo.get("version"), b"N", _CLOSE, b"."]
    return b"".join([b"\x80\x04", memo.written.getvalue(), *body])


def _plain(part: str | int) -> str | int:
    """A part of a path without the class of a user, which readers could not import."""
    if isinstance(part, str):
        return str.__str__(part)
    if type(part) is bool:
        return part
    return int(part)


def _stored_at(memo: _Memo, keys: Array, files: Array, places: Array, offsets: Array | None = None) -> Template:
    """The template of an entry of `storage_data`: where a chunk is stored, or an object, which has no offsets."""
    index: Template = [memo.new(dcp.MetadataIndex) + memo.get("fqn") + _REFERENCE, keys]
    index.append(memo.get("index") + b"N")
    if offsets is not None:
        index += [memo.get("offset"), *memo.shapes(offsets)]
    info: Template = [_CLOSE + memo.new(_StorageInfo) + memo.get("relative_path") + _REFERENCE, files]
    info += [memo.get("offset"), *_integers(places[:, :1])]
    info += [memo.get("length"), *_integers(places[:, 1:]), _CLOSE]
    return index + info
