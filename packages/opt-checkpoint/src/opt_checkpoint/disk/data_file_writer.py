"""The bytes of one data file in order, while a second thread computes checksums.

Nothing that was written is changed later: the checksums of tensors go to the manifest, and their archives have the
checksum 0, which torch never compares. With a spare core, hashing therefore costs no time. The bytes can be read
again from the start, because an upload that fails is repeated as a whole.

Every tensor is an archive as `torch.save` writes it: `data.pkl`, `byteorder`, `version`, then the values as `data/0`,
then the zip directory. `torch.load` can read every stored chunk, so any torch tool reads our checkpoints. Writing the
archive here takes a few microseconds instead of torch's two hundred, streams values directly from their memory, and
records where they begin, so that a part of a chunk can be read.
"""

from __future__ import annotations

import math
import pickle
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opt_checkpoint.boxes import Box, row_major_strides, split_rows
from opt_checkpoint.disk.archives import contiguous
from opt_checkpoint.disk.data_file import (
    HASH_PIECE_BYTES,
    PieceSums,
    bytes_view,
    crc32,
    crc32_combine,
    hashing,
    is_plain_memory,
)
from opt_checkpoint.disk.index import ByteRange, StoredFile
from opt_checkpoint.state.sharded import Shape
from opt_checkpoint.state.tensors import DTYPE_NAMES, STORAGE_CLASSES

ALIGNMENT = 64  # of stored values in their file, as of tensors in memory
_SMALL_BYTES = 256 << 10
_BUFFER_BYTES = 4 << 20
_COPY_BYTES = 2 * HASH_PIECE_BYTES  # copied at a time of a tensor that is not in order on the CPU
_LIMIT_32 = 0xFFFFFFFF
_DOS_DATE = 0x0021  # 1 January 1980, so that equal tensors give equal bytes


@dataclass
class DataFileWriter:
    """The bytes of a data file, in parts; each call begins again.

    After all parts were read, `placed_objects` has the places of the objects by key; `places` and `value_sums` have, of
    each tensor, the start of its values with start and size of the archive around them, and the CRC-32 of each piece.

    Args:
        name: of the file.
        header: the first bytes.
        objects: returns keys and bytes of the objects.
        tensors: returns the values of the tensors.
    """

    name: str
    header: bytes
    objects: Callable[[], Iterable[tuple[str, bytes]]]
    tensors: Callable[[], Iterable[Tensor]]

    def __call__(self) -> Iterator[memoryview]:
        self.placed_objects: dict[str, ByteRange] = {}
        self.places: list[tuple[int, int, int]] = []
        self.value_sums: list[list[int]] = []
        self._sums: list[PieceSums] = []  # of each run of the file
        self._gathered = bytearray(self.header)
        self._given = 0  # bytes
        with hashing() as submit:
            for key, raw in self.objects():
                start = self._given + len(self._gathered)
                self._gathered += raw
                place = ByteRange(file=self.name, start=start, nbytes=len(raw), sums=(crc32(raw),), archive=True)
                self.placed_objects[key] = place
                yield from self._flushed(_BUFFER_BYTES)
            for values in self.tensors():
                yield from self._tensor(submit, values)
            yield from self._flushed()

    def _tensor(self, submit: Callable[..., Future[None]], values: Tensor) -> Iterator[memoryview]:
        """The archive of a tensor, preceded by zeros that align its values."""
        framing = frame_tensor(values.dtype, tuple(values.shape))
        position = self._given + len(self._gathered)
        gap = -(position + len(framing.before)) % ALIGNMENT
        start = position + gap
        self._gathered += bytes(gap) + framing.before
        is_plain = is_plain_memory(values)
        nbytes = values.nbytes
        if nbytes <= _SMALL_BYTES:
            view = bytes_view(values if is_plain else contiguous(values))
            sums = [crc32(view)]
            self._gathered += view
        else:
            yield from self._flushed()
            hashed = PieceSums()
            whole = Box.whole(tuple(values.shape))
            parts = [whole] if is_plain else split_rows(whole, -(-nbytes // _COPY_BYTES))
            for part in parts:
                view = bytes_view(contiguous(whole.part_of(values, part)))
                for first in range(0, len(view), HASH_PIECE_BYTES):
                    piece = view[first : first + HASH_PIECE_BYTES]
                    done = submit(hashed, piece)
                    yield piece
                    self._given += len(piece)
                if not is_plain:
                    done.result()  # frees this copy before the next is made
            self._sums.append(hashed)
            sums = hashed.pieces  # complete once the block of `hashing` has ended
        self._gathered += framing.after
        size = self._given + len(self._gathered) - start
        self.places.append((start + len(framing.before), start, size))
        self.value_sums.append(sums)
        yield from self._flushed(_BUFFER_BYTES)

    def _flushed(self, minimum: int = 1) -> Iterator[memoryview]:
        """The gathered bytes, if there are at least `minimum`."""
        if len(self._gathered) >= minimum:
            view = memoryview(bytes(self._gathered))
            sums = PieceSums()
            sums.add(view)
            self._sums.append(sums)
            self._gathered.clear()
            self._given += len(view)
            yield view

    def written(self) -> StoredFile:
        """Return size and CRC-32 of the file, after all parts were read."""
        total = 0
        for sums in self._sums:
            total = crc32_combine(total, sums.whole, sums.nbytes)
        return StoredFile(size=self._given, crc=total)


class Framing(NamedTuple):
    """The bytes before and after one tensor's values."""

    before: bytes
    after: bytes


@lru_cache(maxsize=4096)
def frame_tensor(dtype: torch.dtype, shape: Shape) -> Framing:
    """Return the bytes around the values of one contiguous tensor, which are little-endian.

    Args:
        dtype: its dtype.
        shape: its shape.
    """
    before = b""
    directory = b""
    nbytes = math.prod(shape) * dtype.itemsize
    files = {b"data.pkl": pickle_tensor(dtype, shape), b"byteorder": b"little", b"version": b"3\n"}
    for name, content in files.items():
        header, listed = _headers(name, len(content), zlib.crc32(content), len(before))
        before = before + header + content
        directory = directory + listed
    header, listed = _headers(b"data/0", nbytes, 0, len(before))
    before = before + header
    directory = directory + listed
    start = len(before) + nbytes
    size = len(directory)
    count = len(files) + 1
    wide = b""
    if start >= _LIMIT_32:
        wide = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, count, count, size, start)
        wide += struct.pack("<IIQI", 0x07064B50, 0, start + size, 1)
    end = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, count, count, size, min(start, _LIMIT_32), 0)
    return Framing(before, directory + wide + end)


def _headers(name: bytes, size: int, crc: int, position: int) -> tuple[bytes, bytes]:
    """The header of a file of a zip archive, stored uncompressed, that begins at `position`, and its entry in the
    directory at the end."""
    name = b"archive/" + name
    stored = size
    version = 20
    extra = b""
    if size >= _LIMIT_32:
        stored = _LIMIT_32
        version = 45
        extra = struct.pack("<HHQQ", 1, 16, size, size)
    lengths = len(name), len(extra)
    common = struct.pack("<HHHHHIIIHH", version, 0, 0, 0, _DOS_DATE, crc, stored, stored, *lengths)
    header = struct.pack("<I", 0x04034B50) + common
    listed = struct.pack("<IH", 0x02014B50, version) + common + struct.pack("<HHHII", 0, 0, 0, 0, position)
    return header + name + extra, listed + name + extra


def pickle_tensor(dtype: torch.dtype, shape: Shape) -> bytes:
    """Return the pickle by which `torch.save` describes a contiguous tensor: protocol 2, storage 0, offset 0."""
    numel = math.prod(shape)
    typed = STORAGE_CLASSES.get(dtype)
    if typed is not None:
        rebuild = b"_rebuild_tensor_v2"
        kind = f"ctorch\n{typed}\n".encode()
        stored = numel
        tail = b""
    else:
        rebuild = b"_rebuild_tensor_v3"
        kind = b"ctorch.storage\nUntypedStorage\n"
        stored = numel * dtype.itemsize
        tail = f"ctorch\n{DTYPE_NAMES[dtype]}\n".encode()
    location = _opcodes("0") + _opcodes("cpu")
    storage = b"(" + _opcodes("storage") + kind + location + _opcodes(stored) + b"tQ"
    place = _opcodes(0) + _opcodes(shape) + _opcodes(row_major_strides(shape))
    hooks = b"\x89ccollections\nOrderedDict\n)R"
    return b"\x80\x02ctorch._utils\n" + rebuild + b"\n(" + storage + place + hooks + tail + b"tR."


def _opcodes(value: Any) -> bytes:
    """The opcodes that push a plain value, without PROTO and STOP."""
    return pickle.dumps(value, 2)[2:-1]
