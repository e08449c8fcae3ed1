"""Safetensors files: headers, encoded and read from untrusted files with every value checked; assignment to files.

Format: 8 bytes little-endian length of the header; a JSON header `{name: {dtype, shape, data_offsets}}` of at most
100 MB, padded with spaces to a multiple of 8; the values, without gaps.

Source: https://github.com/huggingface/safetensors (the format's description).
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from opt_checkpoint.convert.name_maps import Tensors
from opt_checkpoint.disk.index import MAX_DIMS, check_file_name
from opt_checkpoint.errors import CheckpointCorruptError, CheckpointNotFoundError, CheckpointValueError
from opt_checkpoint.state.sharded import Shape
from opt_checkpoint.store.directory import Directory, open_regular

_NAMES = MappingProxyType({
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64", torch.bool: "BOOL",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    **({torch.float8_e8m0fnu: "F8_E8M0"} if hasattr(torch, "float8_e8m0fnu") else {}),
})  # fmt: skip
_DTYPES = MappingProxyType({name: dtype for dtype, name in _NAMES.items()})
_MAX_HEADER_BYTES = 100_000_000
_METADATA = "__metadata__"
INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
DEFAULT_SHARD_BYTES = 5_000_000_000


class Array(NamedTuple):
    """One array of a folder of safetensors files.

    Args:
        file: name of the file that holds it.
        dtype: its dtype.
        shape: its shape.
        start: its first byte in the file.
    """

    file: str
    dtype: torch.dtype
    shape: Shape
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


class Layout(NamedTuple):
    """The files of an export: `model.safetensors`, or numbered ones with an index.

    Args:
        headers: the bytes of every file before its values.
        arrays: all arrays, by name.
    """

    headers: dict[str, bytes]
    arrays: dict[str, Array]

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return sum(array.nbytes for array in self.arrays.values())

    def encode_index(self) -> dict[str, bytes]:
        """Return the name and content of the index; empty for a single file, which needs none."""
        weight_map = {name: array.file for name, array in self.arrays.items()}
        content = {"metadata": {"total_size": self.nbytes}, "weight_map": weight_map}
        return {INDEX: json.dumps(content, indent=1).encode()} if len(self.headers) > 1 else {}


def layout_of(tensors: Tensors, *, dtype: torch.dtype | None, shard_bytes: int) -> Layout:
    """Assign tensors to files, in order, as many to each as fit.

    Args:
        tensors: shape and dtype by name.
        dtype: what floating-point tensors are converted to; None to keep them.
        shard_bytes: maximum size of a file, unless one tensor is larger.

    Raises:
        CheckpointingException: there are no tensors, the format lacks a dtype or a name, there are too many tensors for
            a file, or `shard_bytes` is not positive.
    """
    if not tensors:
        raise CheckpointValueError("the state has no tensor to export")
    if shard_bytes < 1:
        raise CheckpointValueError(f"shard_bytes={shard_bytes} must be at least 1")
    if dtype is not None and not dtype.is_floating_point:
        raise CheckpointValueError(f"dtype={dtype} must be a floating-point dtype, or None to keep each tensor's")
    shards = [list[tuple[str, torch.dtype, Shape]]()]
    size = 0
    for name, (shape, own) in tensors.items():
        stored = dtype if dtype is not None and own.is_floating_point else own
        if stored not in _NAMES:
            raise CheckpointValueError(f"{name} has dtype {stored}, which safetensors files cannot hold")
        if name == _METADATA:
            raise CheckpointValueError(f"a tensor cannot be named {_METADATA} in a safetensors file")
        nbytes = math.prod(shape) * stored.itemsize
        if shards[-1] and size + nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append((name, stored, shape))
        size += nbytes
    layout = Layout({}, {})
    for number, shard in enumerate(shards, 1):
        file = _SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        entries: dict[str, Any] = {_METADATA: {"format": "pt"}}
        end = 0
        shard.sort(key=lambda item: (-item[1].itemsize, item[0]))  # large elements first: all values are aligned
        for name, stored, shape in shard:
            begin = end
            end = end + math.prod(shape) * stored.itemsize
            entries[name] = {"dtype": _NAMES[stored], "shape": list(shape), "data_offsets": [begin, end]}
        raw = json.dumps(entries, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)
        if len(raw) > _MAX_HEADER_BYTES:
            raise CheckpointValueError(f"a header of {len(raw)} bytes; readers accept 100 MB: lower shard_bytes")
        layout.headers[file] = len(raw).to_bytes(8, "little") + raw
        for name, stored, shape in shard:
            layout.arrays[name] = Array(file, stored, shape, 8 + len(raw) + entries[name]["data_offsets"][0])
    return layout


def find_arrays(folder: Path) -> dict[str, Array]:
    """Return the arrays of the files in a folder, by name.

    Raises:
        CheckpointNotFoundError: the folder has no safetensors files.
        CheckpointCorruptError: a file is damaged, or the index contradicts the files.
        OSError: a file cannot be read.
    """
    listed: dict[str, str] | None = None
    if (folder / INDEX).exists():
        try:
            listed = {**json.loads(Directory(folder, follow=True).read(INDEX))["weight_map"]}
        except (ValueError, RecursionError, TypeError, KeyError) as error:
            raise CheckpointCorruptError(f"{folder / INDEX} is not a valid index of files: {error!r:.200}") from None
        files = sorted({str(file) for file in listed.values()})
        for file in files:
            check_file_name(file)
    elif not folder.is_dir():
        raise CheckpointNotFoundError(f"{folder} does not exist, or is not a directory")
    else:
        files = sorted(path.name for path in folder.glob("*.safetensors"))
        files = [_SINGLE] if _SINGLE in files else files
        if len(files) != 1:
            several = f"{len(files)} safetensors files and no {INDEX}, which would say which belong together"
            raise CheckpointNotFoundError(f"{folder} has {several if files else 'no safetensors file'}")
    found: dict[str, Array] = {}
    for file in files:
        try:
            arrays = _read_header(folder / file)
        except FileNotFoundError:
            raise CheckpointCorruptError(f"{folder / file} is missing; {INDEX} names it") from None
        for name, array in arrays.items():
            if name in found:
                raise CheckpointCorruptError(f"{name} is in {found[name].file} and in {file} of {folder}")
            found[name] = array
    for name in () if listed is None else sorted(listed.keys() | found.keys()):
        here = found[name].file if name in found else "no file"
        there = (listed or {}).get(name, "no file")
        if here != there:
            raise CheckpointCorruptError(f"{name} is in {here} of {folder}, and {INDEX} says in {there}")
    return found


def _read_header(path: Path) -> dict[str, Array]:
    """Read the header of a safetensors file, which may be a symbolic link, as in Hugging Face's cache.

    Raises:
        CheckpointCorruptError: it is not a safetensors file, or its header has impossible values.
        OSError: it cannot be read.
    """
    with open(open_regular(path, follow=True), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
            raise CheckpointCorruptError(f"{path} is not a safetensors file: {length} bytes of header in {size}")
        raw = file.read(length)
    try:
        entries = json.loads(raw, object_pairs_hook=_distinct)
        if not isinstance(entries, dict):
            raise CheckpointCorruptError(f"its header is a {type(entries).__name__}, not an object")
        entries.pop(_METADATA, None)
        end = 8 + length
        arrays = {name: _array(path.name, name, entry, end) for name, entry in entries.items()}
        for name, array in sorted(arrays.items(), key=lambda item: (item[1].start, item[1].nbytes)):
            if array.start != end:
                raise CheckpointCorruptError(f"{name} begins at byte {array.start}, not at {end}")
            end += array.nbytes
        if end != size:
            raise CheckpointCorruptError(f"its arrays end at byte {end}, but the file has {size} bytes")
    except CheckpointCorruptError as error:
        raise CheckpointCorruptError(f"{path} is not a safetensors file: {error}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointCorruptError(f"{path} is not a safetensors file: no JSON header: {error!s:.150}") from None
    return arrays


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise CheckpointCorruptError(f"{name!r:.200} is there twice")
        found[name] = value
    return found


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in values)


def _array(file: str, name: str, entry: Any, first: int) -> Array:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointCorruptError(f"{name} must have dtype, shape and data_offsets, and has {entry!r:.200}")
    shape = entry["shape"]
    offsets = entry["data_offsets"]
    dtype = entry["dtype"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise CheckpointCorruptError(f"{name} has dtype {dtype!r:.50}; known are {', '.join(sorted(_DTYPES))}")
    if not (_are_sizes(shape) and _are_sizes(offsets) and len(shape) <= MAX_DIMS and len(offsets) == 2):
        raise CheckpointCorruptError(f"{name} has shape {shape!r:.100} and offsets {offsets!r:.100}")
    array = Array(file, _DTYPES[dtype], tuple(shape), first + offsets[0])
    if offsets[1] - offsets[0] != array.nbytes:
        raise CheckpointCorruptError(f"{name} of {dtype} and shape {shape} cannot have data_offsets {offsets}")
    return array
