"""The manifest: a file with its own checksum, by which a checkpoint is recognised.

A checkpoint is recognised by a manifest with the right checksum; what commits it says `Store.commit`. Our reader needs
nothing else to locate values, and reads no pickle except in stored objects, which are archives of `torch.save`. Unknown
fields are ignored; another format is an error.

It is a file of named arrays: half a million chunks take 25 MB in this format and a few milliseconds to read. JSON would
take 50 MB and many seconds. Layout: a first line that names the format, the length of the header in 8 bytes, a JSON
header, the raw arrays in the header's order, each at a multiple of 8, and the CRC-32 of all preceding bytes in 4 bytes.
All numbers are little-endian.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from opt_checkpoint.boxes import Array
from opt_checkpoint.disk.data_file import crc32
from opt_checkpoint.disk.index import PATHS, ByteRange, CheckpointIndex, Kind, StoredFile, StoredTensors, check_index
from opt_checkpoint.errors import CheckpointCorruptError
from opt_checkpoint.state.sharded import Path, path_text
from opt_checkpoint.store import MANIFEST, Location, store_at

FORMAT = 2
_FIRST_LINE = b"opt-checkpoint manifest %d\n" % FORMAT
_ALIGNMENT = 8
_DTYPES = {name: np.dtype(name) for name in ("|u1", "<u4", "<i8")}


def encode_columns(header: Mapping[str, Any], columns: Mapping[str, Array]) -> bytes:
    """Encode header and arrays as the bytes of a file.

    Args:
        header: any JSON object; the key `columns` is reserved.
        columns: arrays of one or two axes, of uint8, uint32 or int64.
    """
    listed = [[name, array.dtype.str, list(array.shape)] for name, array in columns.items()]
    text = json.dumps({**header, "columns": listed}, separators=(",", ":"), allow_nan=False).encode()
    raw = bytearray(_FIRST_LINE + len(text).to_bytes(8, "little") + text)
    for array in columns.values():
        raw += bytes(-len(raw) % _ALIGNMENT)
        raw += array.tobytes()
    return bytes(raw) + crc32(memoryview(raw)).to_bytes(4, "little")


def decode_columns(raw: bytes, what: str) -> tuple[dict[str, Any], dict[str, Array]]:
    """Decode header and arrays. The arrays are read-only views of `raw`.

    Raises:
        CheckpointCorruptError: the first line or the checksum is wrong, or the header does not describe the arrays.
    """
    body = memoryview(raw)[:-4]
    if not raw.startswith(_FIRST_LINE) or crc32(body) != int.from_bytes(raw[-4:], "little"):
        raise CheckpointCorruptError(f"{what} is damaged: its checksum is wrong or missing")
    try:
        start = len(_FIRST_LINE) + 8
        position = start + int.from_bytes(raw[len(_FIRST_LINE) : start], "little")
        header = json.loads(raw[start:position])
        columns = {}
        for name, dtype, shape in header.pop("columns"):
            position += -position % _ALIGNMENT
            flat = np.frombuffer(body, dtype=_DTYPES[dtype], count=math.prod(map(int, shape)), offset=position)
            columns[str(name)] = flat.reshape([int(n) for n in shape])
            position += flat.nbytes
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointCorruptError(f"{what} does not describe its columns: {error!r}") from error
    return header, columns


COUNTS = "path_parts"
LENGTHS = "path_lengths"


def decode_paths(keys: Sequence[str], columns: Mapping[str, Array]) -> dict[str, Path]:
    """Return the paths by key, from the columns `path_parts`, the number of parts in each (none for a key without a
    path), and `path_lengths`: twice the number of characters of a part, plus one for an integer. Empty without these
    columns.

    Raises:
        CheckpointCorruptError: the columns do not fit the keys.
    """
    if COUNTS not in columns or LENGTHS not in columns:
        return {}
    counts = columns[COUNTS].tolist()
    rest = iter(columns[LENGTHS].tolist())
    if len(counts) != len(keys) or sum(counts) != len(columns[LENGTHS]):
        raise CheckpointCorruptError("the manifest contradicts itself: its paths do not add up")
    paths = dict[str, Path]()
    for key, count in zip(keys, counts):
        parts = list[str | int]()
        start = 0
        try:
            for length in islice(rest, count):
                text = key[start : start + length // 2]
                parts.append(int(text) if length % 2 else text)
                start += length // 2 + 1
            if count and path_text(tuple(parts)) != key:
                raise ValueError(f"it is {parts}")
        except ValueError as error:
            raise CheckpointCorruptError(f"the manifest contradicts itself: the path of {key}: {error}") from error
        if count:
            paths[key] = tuple(parts)
    return paths


_ANY_FIRST_LINE = re.compile(rb"opt-checkpoint manifest (\d{1,9})\n")


def encode_manifest(index: CheckpointIndex) -> bytes:
    """Encode a manifest as the bytes of its file."""
    tensors = index.tensors
    if not isinstance(tensors, StoredTensors):
        raise TypeError("a manifest is made from columns")
    paths = index.details.get(PATHS) or {}
    # Subclasses of text and integers, such as booleans, are not encoded as columns.
    unusual = {key: path for key, path in paths.items() if not {str, int}.issuperset(map(type, path))}
    objects = []
    for key, place in sorted(index.objects.items()):
        objects.append([key, place.file, place.start, place.nbytes, *place.sums])
    files = [[name, file.size, file.crc] for name, file in index.files.items()]
    header = {
        "details": {**index.details, PATHS: unusual},
        "save_id": index.save_id,
        "files": files,
        "objects": objects,
        "dtypes": list(tensors.dtypes),
    }
    usual = [() if key in unusual else tuple(paths.get(key, ())) for key in tensors]
    lengths = [2 * len(str(part)) + isinstance(part, int) for path in usual for part in path]
    columns = {COUNTS: np.array([len(path) for path in usual], "<u4"), LENGTHS: np.array(lengths, "<u4")}
    return encode_columns(header, {**tensors.columns, **columns})


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
    header, columns = decode_columns(raw, what)
    try:
        files = {str(name): StoredFile(size=int(size), crc=int(crc)) for name, size, crc in header["files"]}
        tensors = StoredTensors(columns, tuple(map(str, header["dtypes"])), files)
        details = dict(header["details"])
        details[PATHS] = {**decode_paths(list(tensors), columns), **dict(details.get(PATHS) or {})}
        objects = {}
        for key, file, start, nbytes, crc in header["objects"]:
            sums = (int(crc),)
            objects[str(key)] = ByteRange(file=str(file), start=int(start), nbytes=int(nbytes), sums=sums, archive=True)
        save_id = str(header["save_id"])
    except CheckpointCorruptError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointCorruptError(f"{what} is not a manifest: {error!r}") from error
    index = CheckpointIndex(
        path=path, kind=Kind.OURS, tensors=tensors, objects=objects, files=files, save_id=save_id, details=details
    )
    check_index(index)
    return index
