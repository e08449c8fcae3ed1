"""Safetensors files written in one pass: header, then the values of each tensor, streamed to their place.

Format: 8 bytes little-endian length of the header; a JSON header `{name: {dtype, shape, data_offsets}}` of at most
100 MB, padded with spaces to a multiple of 8; the values, without gaps. Large exports are split into numbered files
with an index beside them.

Source: https://github.com/huggingface/safetensors (the format's description).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from opt_checkpoint.convert.file_backed import by_alignment, mapped_tensors, read_into, select
from opt_checkpoint.disk.index import CheckpointIndex, StoredTensor
from opt_checkpoint.errors import CheckpointingException

_NAMES = MappingProxyType(
    {
        torch.float64: "F64",
        torch.float32: "F32",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.float8_e4m3fn: "F8_E4M3",
        torch.float8_e5m2: "F8_E5M2",
        torch.int64: "I64",
        torch.int32: "I32",
        torch.int16: "I16",
        torch.int8: "I8",
        torch.uint8: "U8",
        torch.uint16: "U16",
        torch.uint32: "U32",
        torch.uint64: "U64",
        torch.bool: "BOOL",
    }
)
_MAX_HEADER_BYTES = 100_000_000
DEFAULT_SHARD_BYTES = 5_000_000_000


def export_safetensors(
    index: CheckpointIndex,
    names: Mapping[str, str],
    folder: Path,
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> list[Path]:
    """Write stored tensors as safetensors, one process, streaming.

    Args:
        index: the checkpoint.
        names: name in the export, by stored key.
        folder: where to; made when needed.
        shard_bytes: largest file, unless one tensor is larger.

    Returns:
        The files: `model.safetensors`, or `model-00001-of-00003.safetensors` and so on with
        `model.safetensors.index.json`.

    Raises:
        CheckpointingException: two tensors get one name, a dtype has no place in the format, or a file is there
            already.
    """
    if len(set(names.values())) != len(names):
        raise CheckpointingException("two stored tensors would be exported under one name")
    shards = _shards(select(index, list(names)), shard_bytes)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / _file_name(number, len(shards)) for number in range(len(shards))]
    for path, shard in zip(paths, shards):
        _write_shard(index, path, shard, names)
    if len(paths) > 1:
        paths.append(_write_index(folder, paths, shards, names))
    return paths


def _file_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _shards(stored: Mapping[str, StoredTensor], limit: int) -> list[dict[str, StoredTensor]]:
    shards: list[dict[str, StoredTensor]] = [{}]
    size = 0
    for key, tensor in stored.items():
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][key] = tensor
        size += tensor.nbytes
    return [by_alignment(shard) for shard in shards]


def _write_shard(
    index: CheckpointIndex, path: Path, shard: Mapping[str, StoredTensor], names: Mapping[str, str]
) -> None:
    if path.exists():
        raise CheckpointingException(f"{path} exists; choose another folder")
    header = _header(shard, names)
    partial = path.with_name(path.name + ".part")
    partial.write_bytes(header)
    tensors = mapped_tensors(partial, shard, start=len(header))
    read_into(index, tensors)
    del tensors
    with partial.open("rb+") as file:
        os.truncate(file.fileno(), len(header) + sum(t.nbytes for t in shard.values()))
        os.fsync(file.fileno())
    partial.rename(path)


def _header(shard: Mapping[str, StoredTensor], names: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for key, tensor in shard.items():
        if tensor.dtype not in _NAMES:
            raise CheckpointingException(f"{key} has dtype {tensor.dtype}, which safetensors files cannot hold")
        offsets = [position, position + tensor.nbytes]
        entries[names[key]] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        position += tensor.nbytes
    raw = json.dumps(entries, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    if len(raw) > _MAX_HEADER_BYTES:
        raise CheckpointingException(
            f"the header would have {len(raw)} bytes, readers take 100 MB; export fewer tensors"
        )
    return len(raw).to_bytes(8, "little") + raw


def _write_index(
    folder: Path, paths: list[Path], shards: list[dict[str, StoredTensor]], names: Mapping[str, str]
) -> Path:
    weight_map = {names[key]: path.name for path, shard in zip(paths, shards) for key in shard}
    total = sum(t.nbytes for shard in shards for t in shard.values())
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1))
    return path
