"""Writes a tensor as a `torch.save` archive: the bytes before and after its values.

`torch.load` can read every stored chunk, so any torch tool reads our checkpoints. Writing the archive here takes a few
microseconds instead of torch's two hundred, streams values directly from their memory, and records where they begin, so
that a part of a chunk can be read.

Layout: `data.pkl`, `byteorder`, `version`, then the values as `data/0`, then the zip directory. The values' checksum
is in the headers before and after them. torch never compares it; that of a large tensor is 0, because it is not known
yet when the header is written.
"""

from __future__ import annotations

import math
import struct
import zlib
from functools import lru_cache
from typing import NamedTuple

import torch

from opt_checkpoint.boxes.box import row_major_strides
from opt_checkpoint.disk.dtype_names import dtype_name, storage_class
from opt_checkpoint.state.sharded import Shape

_LIMIT_32 = 0xFFFFFFFF
_DOS_DATE = 0x0021  # 1 January 1980, so that equal tensors give equal bytes
_ROOT = b"archive/"
_SUM_IN_HEADER, _SUM_IN_DIRECTORY = 14, 16  # position of the checksum in them


class _Entry(NamedTuple):
    """One file of a zip archive, stored uncompressed, that begins at `position`."""

    name: bytes
    size: int
    crc: int
    position: int

    def headers(self) -> tuple[bytes, bytes]:
        """The header before the bytes of the file, and its entry in the directory at the end of the archive."""
        wide = self.size >= _LIMIT_32
        size, version = (_LIMIT_32, 45) if wide else (self.size, 20)
        extra = struct.pack("<HHQQ", 1, 16, self.size, self.size) if wide else b""
        common = struct.pack(
            "<HHHHHIIIHH", version, 0, 0, 0, _DOS_DATE, self.crc, size, size, len(self.name), len(extra)
        )
        before = struct.pack("<I", 0x04034B50) + common + self.name + extra
        listed = struct.pack("<IH", 0x02014B50, version) + common + struct.pack("<HHHII", 0, 0, 0, 0, self.position)
        return before, listed + self.name + extra


class Framing(NamedTuple):
    """The bytes around one tensor's values, if their checksum is 0.

    Args:
        before: the bytes before them.
        after: the bytes after them.
        sums: the position of their checksum in both.
    """

    before: bytes
    after: bytes
    sums: tuple[int, int]

    def with_sum(self, crc: int) -> tuple[bytes, bytes]:
        """The bytes before and after values with this CRC-32."""
        raw, (first, second) = crc.to_bytes(4, "little"), self.sums
        before = b"".join((self.before[:first], raw, self.before[first + 4 :]))
        return before, b"".join((self.after[:second], raw, self.after[second + 4 :]))


def _end_of_directory(count: int, size: int, start: int) -> bytes:
    wide = b""
    if start >= _LIMIT_32:
        wide = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, count, count, size, start)
        wide += struct.pack("<IIQI", 0x07064B50, 0, start + size, 1)
    end = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, count, count, size, min(start, _LIMIT_32), 0)
    return wide + end


@lru_cache(maxsize=4096)
def frame_tensor(dtype: torch.dtype, shape: Shape) -> Framing:
    """The bytes around the values of one contiguous tensor, which are little-endian.

    Args:
        dtype: its dtype.
        shape: its shape.
    """
    before, directory, nbytes = b"", b"", math.prod(shape) * dtype.itemsize
    files = ((b"data.pkl", pickle_tensor(dtype, shape)), (b"byteorder", b"little"), (b"version", b"3\n"))
    for name, content in files:
        entry = _Entry(_ROOT + name, len(content), zlib.crc32(content), len(before))
        header, listed = entry.headers()
        before, directory = before + header + content, directory + listed
    header, listed = _Entry(_ROOT + b"data/0", nbytes, 0, len(before)).headers()
    sums = len(before) + _SUM_IN_HEADER, len(directory) + _SUM_IN_DIRECTORY
    before, directory = before + header, directory + listed
    end = _end_of_directory(len(files) + 1, len(directory), len(before) + nbytes)
    return Framing(before, directory + end, sums)


def pickle_tensor(dtype: torch.dtype, shape: Shape) -> bytes:
    """The pickle by which `torch.save` describes a contiguous tensor: protocol 2, storage 0, offset 0."""
    numel = math.prod(shape)
    typed = storage_class(dtype)
    if typed is not None:
        rebuild, kind, stored, tail = b"_rebuild_tensor_v2", f"ctorch\n{typed}\n".encode(), numel, b""
    else:
        name = dtype_name(dtype)
        rebuild, kind, stored = b"_rebuild_tensor_v3", b"ctorch.storage\nUntypedStorage\n", numel * dtype.itemsize
        tail = f"ctorch\n{name}\n".encode()
    storage = b"(" + _text("storage") + kind + _text("0") + _text("cpu") + _integer(stored) + b"tQ"
    place = _integer(0) + _integers(shape) + _integers(row_major_strides(shape))
    hooks = b"\x89ccollections\nOrderedDict\n)R"
    return b"\x80\x02ctorch._utils\n" + rebuild + b"\n(" + storage + place + hooks + tail + b"tR."


def _text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def _integer(value: int) -> bytes:
    if value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def _integers(values: Shape) -> bytes:
    return b"(" + b"".join(map(_integer, values)) + b"t"
