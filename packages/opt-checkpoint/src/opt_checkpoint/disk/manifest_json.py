"""Reads manifests of format 1, which only earlier versions wrote: JSON with a checksum on the last line."""

from __future__ import annotations

import json
import re
import zlib
from typing import Any

from opt_checkpoint.boxes.box import Box
from opt_checkpoint.disk.dtype_names import dtype_from_name
from opt_checkpoint.disk.index import (
    MAX_DIMS,
    ByteRange,
    CheckpointIndex,
    Kind,
    StoredChunk,
    StoredFile,
    StoredTensor,
    check_index,
)
from opt_checkpoint.errors import CheckpointCorruptError
from opt_checkpoint.objects.path import Location
from opt_checkpoint.state.sharded import Shape

OLD_MANIFEST = "manifest.json"
FORMAT = 1
_LAST_LINE = re.compile(rb"\n#crc32=([0-9a-f]{8})\n\Z")


def decode_old_manifest(path: Location, raw: bytes) -> CheckpointIndex:
    """Decode the index in the bytes of a manifest of format 1.

    Raises:
        CheckpointCorruptError: the manifest is damaged, contradicts itself, or has another format.
    """
    content = _checked_content(path, raw)
    if content.get("format") != FORMAT:
        raise CheckpointCorruptError(
            f"{path / OLD_MANIFEST} has format {content.get('format')!r}; a manifest of this name has format {FORMAT}"
        )
    try:
        index = _index_of(path, content)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointCorruptError(f"{path / OLD_MANIFEST} is not a manifest: {error!r}") from error
    check_index(index)
    return index


def _checked_content(path: Location, raw: bytes) -> dict[str, Any]:
    match = _LAST_LINE.search(raw)
    if match is None or zlib.crc32(raw[: match.start()]) != int(match[1], 16):
        raise CheckpointCorruptError(f"{path / OLD_MANIFEST} is damaged: its checksum is wrong or missing")
    try:
        content = json.loads(raw[: match.start()])
    except (ValueError, RecursionError) as error:
        raise CheckpointCorruptError(f"{path / OLD_MANIFEST} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointCorruptError(f"{path / OLD_MANIFEST} is not a JSON object")
    return content


def _index_of(path: Location, content: dict[str, Any]) -> CheckpointIndex:
    known = ("format", "save_id", "files", "objects", "tensors")
    return CheckpointIndex(
        path=path,
        kind=Kind.OURS,
        tensors={key: _tensor_of(row) for key, row in content["tensors"].items()},
        objects={key: _place_of(row) for key, row in content["objects"].items()},
        files={name: StoredFile(size=int(f["size"]), crc=int(f["crc32"])) for name, f in content["files"].items()},
        save_id=str(content["save_id"]),
        details={key: value for key, value in content.items() if key not in known},
    )


def _place_of(row: list[Any]) -> ByteRange:
    file, start, nbytes, crc = row
    return ByteRange(file=str(file), start=int(start), nbytes=int(nbytes), crc=int(crc))


def _shape_of(row: list[Any]) -> Shape:
    if len(row) > MAX_DIMS:
        raise ValueError(f"a shape has {len(row)} axes")
    return tuple(map(int, row))


def _tensor_of(row: dict[str, Any]) -> StoredTensor:
    chunks = tuple(
        StoredChunk(box=Box(_shape_of(c[0]), _shape_of(c[1])), place=_place_of(c[2:])) for c in row["chunks"]
    )
    return StoredTensor(shape=_shape_of(row["shape"]), dtype=dtype_from_name(row["dtype"]), chunks=chunks)
