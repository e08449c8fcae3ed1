"""Assigns arrays to safetensors files and positions, from shapes and dtypes only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

import torch

from opt_checkpoint.convert.name_boxes import Described
from opt_checkpoint.convert.safetensors_header import Array, Header, encode_header
from opt_checkpoint.errors import CheckpointValueError

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
