"""Writes a tensor as a `torch.save` archive: the bytes before and after its values.

`torch.load` can read every stored chunk, so any torch tool reads our checkpoints. Writing the archive here takes a few
microseconds instead of torch's two hundred, streams values directly from their memory, and records where they begin, so
that a part of a chunk can be read.

Layout: `data.pkl`, `byteorder`, `version`, then the values as `data/0`, then the zip directory. The values' checksum
is in the descriptor and the directory after them, as the zip format allows. torch never compares it; that of a large
tensor is 0, because it is not known yet when the directory is written.
"""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass
from functools import lru_cache

import torch

from opt_checkpoint.boxes.box import row_major_strides
from opt_checkpoint.disk.dtype_names import dtype_name, storage_class
from opt_checkpoint.state.sharded import Shape

_LIMIT_32 = 0xFFFFFFFF
_WITH_DESCRIPTOR = 0x0008
_DOS_DATE = 0x0021  # 1 January 1980, so that equal tensors give equal bytes
_ROOT = b"archive/"
_SUM_IN_DESCRIPTOR, _SUM_IN_DIRECTORY = 4, 16  # position of the checksum in them


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One file of a zip archive, stored uncompressed."""

    name: bytes
    size: int
    crc: int
    position: int

    def local_header(self, *, descriptor: bool) -> bytes:
        """The header before the bytes of the file."""
        wide = self.size >= _LIMIT_32
        size = _LIMIT_32 if wide else self.size
        extra = struct.pack("<HHQQ", 1, 16, self.size, self.size) if wide else b""
        flags = _WITH_DESCRIPTOR if descriptor else 0
        head = struct.pack(
            "<IHHHHHIIIHH",
            0x04034B50,
            45 if wide else 20,
            flags,
            0,
            0,
            _DOS_DATE,
            self.crc,
            size,
            size,
            len(self.name),
            len(extra),
        )
        return head + self.name + extra

    def descriptor(self) -> bytes:
        """The descriptor after the bytes of a file whose checksum was not known before."""
        form = "<IIQQ" if self.size >= _LIMIT_32 else "<IIII"
        return struct.pack(form, 0x08074B50, self.crc, self.size, self.size)

    def directory_header(self, *, descriptor: bool) -> bytes:
        """The file's entry in the directory at the end of the archive."""
        wide = self.size >= _LIMIT_32
        size = _LIMIT_32 if wide else self.size
        extra = struct.pack("<HHQQ", 1, 16, self.size, self.size) if wide else b""
        flags = _WITH_DESCRIPTOR if descriptor else 0
        version = 45 if wide else 20
        head = struct.pack(
            "<IHHHHHHIIIHHHHHII",
            0x02014B50, version, version, flags, 0, 0, _DOS_DATE, self.crc, size, size,
            len(self.name), len(extra), 0, 0, 0, 0, self.position,
        )  # fmt: skip
        return head + self.name + extra


@dataclass(frozen=True, slots=True, kw_only=True)
class Framing:
    """The bytes around one tensor's values.

    Args:
        header: the bytes before them.
        before_sum: the bytes after them, up to their checksum in the descriptor.
        between_sums: the bytes from there to their checksum in the directory.
        after_sum: the remaining bytes.
    """

    header: bytes
    before_sum: bytes
    between_sums: bytes
    after_sum: bytes

    def trailer(self, crc: int) -> bytes:
        """The bytes after the values, which include their CRC-32."""
        raw = crc.to_bytes(4, "little")
        return b"".join((self.before_sum, raw, self.between_sums, raw, self.after_sum))


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
    header, entries = b"", []
    files = ((b"data.pkl", pickle_tensor(dtype, shape)), (b"byteorder", b"little"), (b"version", b"3\n"))
    for name, content in files:
        entry = Entry(name=_ROOT + name, size=len(content), crc=zlib.crc32(content), position=len(header))
        entries.append(entry)
        header += entry.local_header(descriptor=False) + content
    values = Entry(name=_ROOT + b"data/0", size=math.prod(shape) * dtype.itemsize, crc=0, position=len(header))
    header += values.local_header(descriptor=True)
    descriptor = values.descriptor()
    small = b"".join(entry.directory_header(descriptor=False) for entry in entries)
    directory = small + values.directory_header(descriptor=True)
    end = _end_of_directory(len(entries) + 1, len(directory), len(header) + values.size + len(descriptor))
    trailer, second = descriptor + directory + end, len(descriptor) + len(small) + _SUM_IN_DIRECTORY
    return Framing(
        header=header,
        before_sum=trailer[:_SUM_IN_DESCRIPTOR],
        between_sums=trailer[_SUM_IN_DESCRIPTOR + 4 : second],
        after_sum=trailer[second + 4 :],
    )


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
