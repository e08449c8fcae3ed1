"""Writes a box of an array to its position in a file that other ranks also write."""

from __future__ import annotations

import itertools

from torch import Tensor

from opt_checkpoint.boxes.box import row_major_strides
from opt_checkpoint.disk.checksums import bytes_view
from opt_checkpoint.disk.files import Files, write_all_at
from opt_checkpoint.disk.read_region import Region
from opt_checkpoint.disk.torch_zip_reader import contiguous


def write_region(files: Files, fd: int, values: Tensor, region: Region, start: int) -> int:
    """Write a box of an array, with one call for each contiguous run of bytes.

    Args:
        files: the file system.
        fd: the file.
        values: of the region's shape.
        region: the box.
        start: position of the array's first value in the file.

    Returns:
        Bytes written.

    Raises:
        OSError: the file system reports an error.
    """
    if not values.numel():
        return 0
    raw, itemsize = bytes_view(contiguous(values)), values.element_size()
    strides = row_major_strides(region.chunk)
    axes = range(len(region.sizes))
    # The box is complete along all axes after `axis`, so its part at one index of the axes before is one run.
    axis = next((d for d in reversed(axes) if region.sizes[d] != region.chunk[d]), 0)
    run_bytes = len(raw)
    for n in region.sizes[:axis]:
        run_bytes //= n
    first = start + sum(o * s for o, s in zip(region.offsets, strides)) * itemsize
    for number, index in enumerate(itertools.product(*(range(n) for n in region.sizes[:axis]))):
        position = first + sum(i * s for i, s in zip(index, strides)) * itemsize
        write_all_at(files, fd, raw[number * run_bytes :][:run_bytes], position)
    return len(raw)
