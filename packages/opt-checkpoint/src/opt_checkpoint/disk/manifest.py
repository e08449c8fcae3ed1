"""The manifest: the file with its own checksum that makes a directory a checkpoint.

A checkpoint is committed if and only if its manifest exists and has the right checksum. Our reader needs nothing else
to locate values, and reads no pickle except in stored objects, which are archives of `torch.save`. Unknown fields are
ignored; another format is an error.
"""

from __future__ import annotations

import re
from typing import Any

from opt_checkpoint.disk.columns import decode_columns, decode_paths, encode_columns, encode_paths, is_usual
from opt_checkpoint.disk.index import PATHS, ByteRange, CheckpointIndex, Kind, StoredFile, check_index
from opt_checkpoint.disk.stored_tensors import StoredTensors
from opt_checkpoint.errors import CheckpointCorruptError
from opt_checkpoint.store import MANIFEST, Location, store_at

FORMAT = 2
_FIRST_LINE = b"opt-checkpoint manifest %d\n"
_ANY_FIRST_LINE = re.compile(rb"opt-checkpoint manifest (\d{1,9})\n")


def encode_manifest(index: CheckpointIndex) -> bytes:
    """Encode a manifest as the bytes of its file."""
    tensors = index.tensors
    if not isinstance(tensors, StoredTensors):
        raise TypeError("a manifest is made from columns")
    paths = index.details.get(PATHS) or {}
    unusual = {key: path for key, path in paths.items() if not is_usual(path)}
    header = {
        "details": {**index.details, PATHS: unusual},
        "save_id": index.save_id,
        "files": [[name, file.size, file.crc] for name, file in index.files.items()],
        "objects": [[key, p.file, p.start, p.nbytes, p.crc] for key, p in sorted(index.objects.items())],
        "dtypes": list(tensors.dtypes),
    }
    columns = encode_paths(list(tensors), {key: path for key, path in paths.items() if key not in unusual})
    return encode_columns(_FIRST_LINE % FORMAT, header, {**tensors.columns, **columns})


def read_manifest(path: Location) -> CheckpointIndex:
    """Read the index of a checkpoint.

    Args:
        path: the checkpoint's directory.

    Raises:
        CheckpointCorruptError: the manifest is damaged, contradicts itself, or has a format this version cannot read.
        FileNotFoundError: there is no manifest.
        OSError: it cannot be read.
    """
    return decode_manifest(path, store_at(path).read(MANIFEST))


def decode_manifest(path: Location, raw: bytes) -> CheckpointIndex:
    """Decode the index in the bytes of a manifest. Raises like `read_manifest`."""
    what = str(path / MANIFEST)
    first = _ANY_FIRST_LINE.match(raw)
    if first is not None and int(first[1]) != FORMAT:
        raise CheckpointCorruptError(
            f"{what} has format {int(first[1])}; this version of opt-checkpoint reads {FORMAT}"
        )
    header, columns = decode_columns(_FIRST_LINE % FORMAT, raw, what)
    try:
        index = _index_of(path, header, columns)
    except CheckpointCorruptError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointCorruptError(f"{what} is not a manifest: {error!r}") from error
    check_index(index)
    return index


def _index_of(path: Location, header: dict[str, Any], columns: dict[str, Any]) -> CheckpointIndex:
    files = {str(name): StoredFile(size=int(size), crc=int(crc)) for name, size, crc in header["files"]}
    if any(not 0 <= file.size < 1 << 62 for file in files.values()):
        raise ValueError("a file has an impossible size")
    tensors = StoredTensors(columns, tuple(map(str, header["dtypes"])), files)
    details = dict(header.get("details", {}))
    return CheckpointIndex(
        path=path,
        kind=Kind.OURS,
        tensors=tensors,
        objects={
            str(key): ByteRange(file=str(file), start=int(start), nbytes=int(nbytes), crc=int(crc), archive=True)
            for key, file, start, nbytes, crc in header["objects"]
        },
        files=files,
        save_id=str(header["save_id"]),
        details={**details, PATHS: {**decode_paths(list(tensors), columns), **dict(details.get(PATHS) or {})}},
    )
