"""A file of named arrays: a JSON header, the raw arrays, and a checksum of both.

Half a million chunks take 25 MB in this format and a few milliseconds to read. JSON would take 50 MB and many seconds.

Layout: a first line that names the format, the length of the header in 8 bytes, the header, the arrays in the header's
order, each at a multiple of 8, and the CRC-32 of all preceding bytes in 4 bytes. All numbers are little-endian.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from opt_checkpoint.disk.checksums import crc32
from opt_checkpoint.errors import CheckpointCorruptError
from opt_checkpoint.state.tree import Path, path_text

Array = npt.NDArray[Any]
_ALIGNMENT = 8
_DTYPES = {name: np.dtype(name) for name in ("|u1", "<u4", "<i8")}


def encode_columns(first_line: bytes, header: Mapping[str, Any], columns: Mapping[str, Array]) -> bytes:
    """Encode header and arrays as the bytes of a file.

    Args:
        first_line: names the format; ends in a line feed.
        header: any JSON object; the key `columns` is reserved.
        columns: arrays of one or two axes, of uint8, uint32 or int64.
    """
    listed = [[name, array.dtype.str, list(array.shape)] for name, array in columns.items()]
    text = json.dumps({**header, "columns": listed}, separators=(",", ":"), allow_nan=False).encode()
    parts = [first_line, len(text).to_bytes(8, "little"), text]
    position = sum(map(len, parts))
    for array in columns.values():
        parts += [bytes(-position % _ALIGNMENT), array.tobytes()]
        position += -position % _ALIGNMENT + array.nbytes
    raw = b"".join(parts)
    return raw + crc32(raw).to_bytes(4, "little")


def decode_columns(first_line: bytes, raw: bytes, what: str) -> tuple[dict[str, Any], dict[str, Array]]:
    """Decode header and arrays. The arrays are read-only views of `raw`.

    Raises:
        CheckpointCorruptError: the first line or the checksum is wrong, or the header does not describe the arrays.
    """
    body = memoryview(raw)[:-4]
    if not raw.startswith(first_line) or crc32(body) != int.from_bytes(raw[-4:], "little"):
        raise CheckpointCorruptError(f"{what} is damaged: its checksum is wrong or missing")
    try:
        start = len(first_line) + 8
        position = start + int.from_bytes(raw[len(first_line) : start], "little")
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


COUNTS, LENGTHS = "path_parts", "path_lengths"


def is_usual(path: Sequence[object]) -> bool:
    """Whether a path can be encoded: its parts must be strings and integers, not subclasses such as booleans."""
    return all(type(part) in (str, int) for part in path)


def encode_paths(keys: Sequence[str], paths: Mapping[str, Path]) -> dict[str, Array]:
    """The columns `path_parts`, the number of parts in the path of each key, and `path_lengths`.

    A length is twice the number of characters of a part, plus one for an integer. A key without a path has no parts.

    Args:
        keys: all keys, in order.
        paths: paths by key, all of them usual; `path_text` of a path is its key.
    """
    own = [paths.get(key, ()) for key in keys]
    lengths = [2 * len(str(part)) + isinstance(part, int) for path in own for part in path]
    return {COUNTS: np.array([len(path) for path in own], "<u4"), LENGTHS: np.array(lengths, "<u4")}


def decode_paths(keys: Sequence[str], columns: Mapping[str, Array]) -> dict[str, Path]:
    """The paths by key; empty without these columns, as in older manifests.

    Raises:
        CheckpointCorruptError: the columns do not fit the keys.
    """
    if COUNTS not in columns or LENGTHS not in columns:
        return {}
    counts, lengths = columns[COUNTS].tolist(), columns[LENGTHS].tolist()
    if len(counts) != len(keys) or sum(counts) != len(lengths):
        raise CheckpointCorruptError("the manifest contradicts itself: its paths do not add up")
    paths, position = {}, 0
    for key, count in zip(keys, counts):
        if count:
            paths[key] = tuple(_parts(key, lengths[position : position + count]))
            position += count
            if path_text(paths[key]) != key:
                raise CheckpointCorruptError(f"the manifest contradicts itself: the path of {key} is {paths[key]}")
    return paths


def _parts(key: str, lengths: Sequence[int]) -> Iterator[str | int]:
    start = 0
    for length in lengths:
        text = key[start : start + length // 2]
        if length % 2 and not text.lstrip("-").isdecimal():
            raise CheckpointCorruptError(f"the manifest contradicts itself: {text!r} in the path of {key} is a number")
        yield int(text) if length % 2 else text
        start += length // 2 + 1
