"""Reads a box of a stored chunk into a tensor: directly if both are one run of bytes, else in bounded pieces."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from opt_checkpoint.boxes.box import row_major_strides
from opt_checkpoint.disk.checksums import bytes_view
from opt_checkpoint.state.sharded import Shape

_BOUNCE_BYTES = 32 << 20


class Span(NamedTuple):
    """Elements `[start, stop)` of a chunk's row-major order."""

    start: int
    stop: int


class Region(NamedTuple):
    """A box of values within a chunk.

    Args:
        chunk: shape of the chunk.
        offsets: offsets of the box in it.
        sizes: shape of the box.
    """

    chunk: Shape
    offsets: Shape
    sizes: Shape

    @property
    def span(self) -> Span:
        """The elements from the first value of the box to its last."""
        strides = row_major_strides(self.chunk)
        start = sum(o * s for o, s in zip(self.offsets, strides))
        return Span(start, start + sum((n - 1) * s for n, s in zip(self.sizes, strides)) + 1)

    @property
    def is_run(self) -> bool:
        """Whether the span contains only the box."""
        return self.span.stop - self.span.start == math.prod(self.sizes)

    def of_bytes(self, raw: memoryview, dtype: torch.dtype) -> Tensor:
        """The box as a view of bytes that begin with its span."""
        flat = torch.frombuffer(raw, dtype=dtype)
        return flat.as_strided(self.sizes, row_major_strides(self.chunk))

    def of_tensor(self, chunk: Tensor) -> Tensor:
        """The box of a whole chunk, as a view."""
        for axis, (start, size) in enumerate(zip(self.offsets, self.sizes)):
            chunk = chunk.narrow(axis, start, size)
        return chunk

    def rows(self, axis: int, start: int, count: int) -> Region:
        """The box's rows `[start, start + count)` along an axis."""
        offsets = tuple(o + start if d == axis else o for d, o in enumerate(self.offsets))
        return Region(self.chunk, offsets, tuple(count if d == axis else n for d, n in enumerate(self.sizes)))


class Readable(Protocol):
    """A source of bytes that can be read at any position."""

    near_bytes: int  # reading up to this many unneeded bytes costs less than another read

    def read_into(self, start: int, view: memoryview) -> None:
        """Fill `view` with the bytes from `start` on."""


class FilePosition(NamedTuple):
    """The position in a file where the span of a region begins."""

    file: Readable
    start: int

    @property
    def near_bytes(self) -> int:
        """Rows with smaller gaps than this are read together with the bytes between them."""
        return self.file.near_bytes


def read_region(target: Tensor, region: Region, dtype: torch.dtype, source: FilePosition) -> None:
    """Read a region into `target`, converting to its dtype and device; writes only `target`.

    Needs at most 32 MB besides the target, unless a single row is larger.

    Args:
        target: of the region's shape.
        region: the box of the stored chunk.
        dtype: the stored dtype.
        source: position of the region's first value.
    """
    nbytes = (region.span.stop - region.span.start) * dtype.itemsize
    if region.is_run and target.dtype == dtype and is_plain_memory(target):
        source.file.read_into(source.start, bytes_view(target))
    elif nbytes <= _BOUNCE_BYTES and (region.is_run or _largest_gap(region) * dtype.itemsize <= source.near_bytes):
        raw = memoryview(bytearray(nbytes))
        source.file.read_into(source.start, raw)
        target.copy_(region.of_bytes(raw, dtype))
    else:
        _read_rows(target, region, dtype, source)


def is_plain_memory(target: Tensor) -> bool:
    """Whether the bytes of a tensor's memory are its values in row-major order."""
    return target.device.type == "cpu" and target.is_contiguous() and not target.is_conj() and not target.is_neg()


def _largest_gap(region: Region) -> int:
    """Elements skipped between two neighbouring runs of the box, along the outermost axis that has any."""
    axis = next(d for d, n in enumerate(region.sizes) if n > 1)
    row = region.rows(axis, 0, 1).span
    return row_major_strides(region.chunk)[axis] - (row.stop - row.start)


def _read_rows(target: Tensor, region: Region, dtype: torch.dtype, source: FilePosition) -> None:
    """Divide the outermost axis into two or more parts, and fill each part."""
    axis = next(d for d, n in enumerate(region.sizes) if n > 1)  # one value alone is a run, and small
    stride = row_major_strides(region.chunk)[axis] * dtype.itemsize
    near = region.is_run or _largest_gap(region) * dtype.itemsize <= source.near_bytes
    step = max(1, min(region.sizes[axis] // 2, _BOUNCE_BYTES // stride)) if near else 1
    for start in range(0, region.sizes[axis], step):
        count = min(step, region.sizes[axis] - start)
        part = target.narrow(axis, start, count)
        read_region(
            part, region.rows(axis, start, count), dtype, FilePosition(source.file, source.start + start * stride)
        )
