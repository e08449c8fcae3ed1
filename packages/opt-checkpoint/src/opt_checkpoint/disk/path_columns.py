"""The paths of plain tensors in the saved state as columns. A key is the text of its path, so lengths suffice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from opt_checkpoint.disk.columns import Array
from opt_checkpoint.errors import CheckpointCorruptError
from opt_checkpoint.state.tree import Path, path_text

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
