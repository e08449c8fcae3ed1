"""Safetensors files: headers, encoded and read from untrusted files with every value checked; assignment to files.

Format: 8 bytes little-endian length of the header; a JSON header `{name: {dtype, shape, data_offsets}}` of at most
100 MB, padded with spaces to a multiple of 8; the values, without gaps.

Source: https://github.com/huggingface/safetensors (the format's description).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from opt_checkpoint.convert.name_boxes import Described
from opt_checkpoint.disk.index import MAX_DIMS
from opt_checkpoint.errors import CheckpointCorruptError, CheckpointValueError
from opt_checkpoint.state.sharded import Shape
from opt_checkpoint.store.directory import open_regular

_NAMES = MappingProxyType(
    {
        torch.float64: "F64",
        torch.float32: "F32",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.float8_e4m3fn: "F8_E4M3",
        torch.float8_e5m2: "F8_E5M2",
        torch.complex64: "C64",
        torch.int64: "I64",
        torch.int32: "I32",
        torch.int16: "I16",
        torch.int8: "I8",
        torch.uint8: "U8",
        torch.uint16: "U16",
        torch.uint32: "U32",
        torch.uint64: "U64",
        torch.bool: "BOOL",
        **({torch.float8_e8m0fnu: "F8_E8M0"} if hasattr(torch, "float8_e8m0fnu") else {}),
    }
)
_DTYPES = MappingProxyType({name: dtype for dtype, name in _NAMES.items()})
_MAX_HEADER_BYTES = 100_000_000
_METADATA = "__metadata__"


class Array(NamedTuple):
    """One array of a safetensors file.

    Args:
        dtype: its dtype.
        shape: its shape.
        start: its first byte in the file.
    """

    dtype: torch.dtype
    shape: Shape
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


class Header(NamedTuple):
    """The beginning of a file.

    Args:
        raw: its bytes, whose length is a multiple of 8.
        arrays: position of every array; they are stored in this order, without gaps.
    """

    raw: bytes
    arrays: dict[str, Array]


def encode_header(tensors: Mapping[str, tuple[torch.dtype, Shape]]) -> Header:
    """Encode the header of a file with tensors in the given order.

    Args:
        tensors: dtype and shape by name; large elements first, so that all values are aligned.

    Raises:
        CheckpointingException: the format does not support a dtype or a name, or there are too many tensors.
    """
    entries: dict[str, object] = {_METADATA: {"format": "pt"}}
    position = 0
    for name, (dtype, shape) in tensors.items():
        if dtype not in _NAMES:
            raise CheckpointValueError(f"{name} has dtype {dtype}, which safetensors files cannot hold")
        if name == _METADATA:
            raise CheckpointValueError(f"a tensor cannot be named {_METADATA} in a safetensors file")
        stop = position + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [position, stop]}
        position = stop
    raw = json.dumps(entries, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    if len(raw) > _MAX_HEADER_BYTES:
        raise CheckpointValueError(
            f"the header would have {len(raw)} bytes, but readers accept at most 100 MB; use a smaller shard_bytes"
        )
    starts = {name: 8 + len(raw) + entry["data_offsets"][0] for name, entry in entries.items() if name in tensors}  # type: ignore[index]
    arrays = {name: Array(dtype, tuple(shape), starts[name]) for name, (dtype, shape) in tensors.items()}
    return Header(len(raw).to_bytes(8, "little") + raw, arrays)


def read_header(path: Path) -> dict[str, Array]:
    """Read the header of a safetensors file, which may be a symbolic link, as in Hugging Face's cache.

    Raises:
        CheckpointCorruptError: it is not a safetensors file, or its header has impossible values.
        OSError: it cannot be read.
    """
    with open(open_regular(path, follow=True), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
            raise CheckpointCorruptError(
                f"{path} is not a safetensors file: its header would have {length} bytes, but the file has {size}"
            )
        raw = file.read(length)
    try:
        entries = _parsed(raw)
        entries.pop(_METADATA, None)
        arrays = {name: _array(name, entry, 8 + length) for name, entry in entries.items()}
        _check_gaps(arrays, 8 + length, size)
    except CheckpointCorruptError as error:
        raise CheckpointCorruptError(f"{path} is not a safetensors file: {error}") from None
    return arrays


def _parsed(raw: bytes) -> dict[str, Any]:
    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise CheckpointCorruptError(f"{name!r:.200} is there twice")
            found[name] = value
        return found

    try:
        entries = json.loads(raw, object_pairs_hook=distinct)
    except CheckpointCorruptError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointCorruptError(f"its header is not JSON: {error}"[:200]) from None
    if not isinstance(entries, dict):
        raise CheckpointCorruptError(f"its header is a {type(entries).__name__}, not an object")
    return entries


def _array(name: str, entry: Any, first: int) -> Array:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointCorruptError(f"{name} must have dtype, shape and data_offsets, and has {entry!r:.200}")
    shape, offsets, dtype = entry["shape"], entry["data_offsets"], entry["dtype"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise CheckpointCorruptError(f"{name} has dtype {dtype!r:.50}; known are {', '.join(sorted(_DTYPES))}")
    if not (_are_sizes(shape) and len(shape) <= MAX_DIMS and _are_sizes(offsets) and len(offsets) == 2):
        raise CheckpointCorruptError(f"{name} has shape {shape!r:.100} and offsets {offsets!r:.100}")
    array = Array(_DTYPES[dtype], tuple(shape), first + offsets[0])
    if offsets[1] - offsets[0] != array.nbytes:
        raise CheckpointCorruptError(f"{name} of {dtype} and shape {shape} cannot have data_offsets {offsets}")
    return array


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in values)


def _check_gaps(arrays: Mapping[str, Array], first: int, size: int) -> None:
    """Raise if arrays overlap, have gaps between them, or do not end at the end of the file."""
    end = first
    for name, array in sorted(arrays.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if array.start != end:
            raise CheckpointCorruptError(f"{name} begins at byte {array.start}, not at {end}")
        end += array.nbytes
    if end != size:
        raise CheckpointCorruptError(f"its arrays end at byte {end}, but the file has {size} bytes")


FOLDER = "a folder of safetensors files"  # in messages
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DEFAULT_SHARD_BYTES = 5_000_000_000


class PlacedArray(NamedTuple):
    """An array, and the file that contains it."""

    file: str
    array: Array


class Layout(NamedTuple):
    """The files of an export: `model.safetensors`, or numbered ones with an index.

    Args:
        headers: the header of every file.
        places: where every array is.
    """

    headers: dict[str, Header]
    places: dict[str, PlacedArray]

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return sum(place.array.nbytes for place in self.places.values())

    def encode_index(self) -> bytes | None:
        """The content of the index; None for a single file, which needs none."""
        if len(self.headers) == 1:
            return None
        weight_map = {name: place.file for name, place in self.places.items()}
        return json.dumps({"metadata": {"total_size": self.nbytes}, "weight_map": weight_map}, indent=1).encode()


def layout_of(
    tensors: Mapping[str, Described], *, dtype: torch.dtype | None = None, shard_bytes: int = DEFAULT_SHARD_BYTES
) -> Layout:
    """Assign tensors to files.

    Args:
        tensors: shape and dtype by name.
        dtype: what floating-point tensors are converted to; None to keep them.
        shard_bytes: maximum size of a file, unless one tensor is larger.

    Raises:
        CheckpointingException: there are no tensors, the format lacks a dtype, or `shard_bytes` is not positive.
    """
    if not tensors:
        raise CheckpointValueError("the state has no tensor to export")
    if shard_bytes < 1:
        raise CheckpointValueError(f"shard_bytes={shard_bytes} must be at least 1")
    if dtype is not None and not dtype.is_floating_point:
        raise CheckpointValueError(f"dtype={dtype} must be a floating-point dtype, or None to keep each tensor's")
    described = {name: (stored_dtype(own.dtype, dtype), own.shape) for name, own in tensors.items()}
    shards = _shards(described, shard_bytes)
    headers = {_file_name(i, len(shards)): encode_header(shard) for i, shard in enumerate(shards)}
    places = {name: PlacedArray(file, a) for file, header in headers.items() for name, a in header.arrays.items()}
    return Layout(headers, places)


def stored_dtype(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """The dtype of a tensor in the export: the wanted one for floating-point tensors."""
    return wanted if wanted is not None and own.is_floating_point else own


def _file_name(number: int, count: int) -> str:
    return SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


_Shard = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def _shards(tensors: _Shard, limit: int) -> list[_Shard]:
    """Divide tensors into shards in order, as many per shard as fit. In a shard, tensors with larger elements come
    first, so that values are aligned."""
    shards: list[_Shard] = [{}]
    size = 0
    for name, (dtype, shape) in tensors.items():
        nbytes = Array(dtype, shape, 0).nbytes
        if shards[-1] and size + nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = (dtype, shape)
        size += nbytes
    return [dict(sorted(shard.items(), key=lambda own: (-own[1][0].itemsize, own[0]))) for shard in shards]
