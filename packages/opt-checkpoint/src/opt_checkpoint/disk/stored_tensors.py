"""The stored tensors of a checkpoint as columns, from which objects are created on access.

A rank of a large run needs a few hundred of half a million chunks. Creating objects for all of them would take minutes
and gigabytes on every rank. The columns take milliseconds, are checked as a whole, and are sent to other ranks
unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from opt_checkpoint.boxes import Array, Box
from opt_checkpoint.disk.checksums import PIECE_BYTES
from opt_checkpoint.disk.index import MAX_DIMS, ByteRange, StoredChunk, StoredFile, StoredTensor
from opt_checkpoint.errors import CheckpointCorruptError
from opt_checkpoint.state.dtype_names import dtype_from_name

_LIMIT = 1 << 62
_COLUMNS = {
    "keys": ("|u1", 1),  # all keys one after another, as UTF-8
    "key_bytes": ("<u4", 1),
    "dtype": ("|u1", 1),  # a number in the list of dtypes
    "ndim": ("|u1", 1),
    "shape": ("<i8", 2),  # one row per tensor; axes that it has not count 1
    "chunks": ("<i8", 1),  # how many chunks each tensor has; they follow in the tensors' order
    "offsets": ("<i8", 2),  # one row per chunk
    "sizes": ("<i8", 2),
    "file": ("<u4", 1),  # a number in the list of files
    "start": ("<i8", 1),
    "sums": ("<u4", 1),  # CRC-32 of every `PIECE_BYTES` of every chunk
}


class StoredTensors(Mapping[str, StoredTensor]):
    """Stored tensors by key.

    Args:
        columns: as `_COLUMNS` lists them.
        dtypes: names of dtypes, by number.
        files: the data files, by number.

    Raises:
        CheckpointCorruptError: a column is missing, columns contradict each other or the files, a chunk lies outside
            its tensor, or the chunks do not add up to their tensor.
    """

    def __init__(self, columns: Mapping[str, Array], dtypes: tuple[str, ...], files: Mapping[str, StoredFile]) -> None:
        for name, (dtype, ndim) in _COLUMNS.items():
            if name not in columns or columns[name].dtype.str != dtype or columns[name].ndim != ndim:
                raise CheckpointCorruptError(f"the manifest has no column {name} of {dtype} with {ndim} axes")
        self.columns, self.dtypes, self._files = {name: columns[name] for name in _COLUMNS}, tuple(dtypes), dict(files)
        self._check()

    def __getstate__(self) -> tuple[Any, ...]:
        return self.columns, self.dtypes, self._files

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.columns, self.dtypes, self._files = state
        self._derive()  # checked where they were read

    def _derive(self) -> None:
        """Keys, and for each chunk the index of its tensor, its bytes and the index of its first checksum."""
        c, self._dtypes, self._file_names = self.columns, list(map(dtype_from_name, self.dtypes)), list(self._files)
        self._made: dict[str, StoredTensor] = {}
        blob, bounds = c["keys"].tobytes(), accumulate(c["key_bytes"].tolist(), initial=0)
        try:
            keys = [blob[a:b].decode("utf-8", "surrogatepass") for a, b in pairwise(bounds)]
        except UnicodeDecodeError as error:
            raise CheckpointCorruptError(f"the manifest is damaged: a key is not text: {error}") from error
        self._numbers = {key: number for number, key in enumerate(keys)}
        self._owner = np.repeat(np.arange(len(c["chunks"])), c["chunks"])
        itemsize = np.array([dtype.itemsize for dtype in self._dtypes] or [1], "<i8")
        self._chunk_bytes = np.prod(c["sizes"], axis=1, dtype="<i8") * itemsize[c["dtype"][self._owner]]
        pieces = np.maximum(1, -(-self._chunk_bytes // PIECE_BYTES))
        self._first_sum, self._first_chunk = (np.append(0, np.cumsum(n, dtype="<i8")) for n in (pieces, c["chunks"]))

    def _check(self) -> None:
        c, tensors, chunks = self.columns, len(self.columns["ndim"]), len(self.columns["start"])
        axes = c["shape"].shape[1]
        lengths = [len(c[name]) for name in ("key_bytes", "dtype", "shape", "chunks")]
        _require(all(n == tensors for n in lengths), "its columns of tensors differ in length")
        _require(all(len(c[name]) == chunks for name in ("offsets", "sizes", "file")), "its columns differ in length")
        _require(axes <= MAX_DIMS and c["offsets"].shape[1] == c["sizes"].shape[1] == axes, "its axes differ")
        _require(c["ndim"].max(initial=0) <= axes, "a tensor has more axes than its shape")
        _require(c["dtype"].max(initial=0) < max(1, len(self.dtypes)), "a dtype is not listed")
        _require(c["file"].max(initial=0) < max(1, len(self._files)), "a file is not listed")
        _require(c["key_bytes"].sum() == len(c["keys"]), "its keys do not add up")
        for name in ("shape", "chunks", "offsets", "sizes", "start"):
            _require(((c[name] >= 0) & (c[name] < _LIMIT)).all(), f"a number of {name} is out of range")
        _require(c["chunks"].sum(dtype=np.float64) == chunks, "its chunks do not add up")
        unused = np.arange(axes) >= c["ndim"][:, None]
        _require((c["shape"][unused] == 1).all(), "a shape has values beyond its axes")
        for name in ("shape", "sizes"):
            rough = np.prod(c[name].astype(np.float64), axis=1)
            _require(rough.max(initial=0) < _LIMIT / 32, "a tensor is larger than any file")
        self._derive()
        _require(len(self._numbers) == tensors, "a key is listed twice")
        inside = (c["sizes"] >= 1) & (c["offsets"] + c["sizes"] <= c["shape"][self._owner])
        _require(inside.all(), "a chunk lies outside its tensor")
        held = np.zeros(tensors, "<i8")
        np.add.at(held, self._owner, np.prod(c["sizes"], axis=1, dtype="<i8"))
        _require((held == np.prod(c["shape"], axis=1, dtype="<i8")).all(), "the chunks of a tensor do not fill it")
        sizes = np.array([file.size for file in self._files.values()] or [0], "<i8")
        _require((self._chunk_bytes <= sizes[c["file"]] - c["start"]).all(), "a chunk lies outside its file")
        _require(self._first_sum[-1] == len(c["sums"]), "its checksums do not add up")

    def __getitem__(self, key: str) -> StoredTensor:
        if key not in self._made:
            self._made[key] = self._make(self._numbers[key])
        return self._made[key]

    def _make(self, number: int) -> StoredTensor:
        c, axes = self.columns, int(self.columns["ndim"][number])
        dtype: torch.dtype = self._dtypes[c["dtype"][number]]
        first, last = int(self._first_chunk[number]), int(self._first_chunk[number + 1])
        rows = slice(first, last)
        sums, bounds = c["sums"], self._first_sum[first : last + 1].tolist()
        chunks = tuple(
            StoredChunk(
                box=Box(tuple(offsets[:axes]), tuple(sizes[:axes])),
                place=ByteRange(
                    file=self._file_names[file], start=start, nbytes=nbytes, sums=tuple(sums[a:b].tolist())
                ),
            )
            for offsets, sizes, file, start, nbytes, a, b in zip(
                c["offsets"][rows].tolist(),
                c["sizes"][rows].tolist(),
                c["file"][rows].tolist(),
                c["start"][rows].tolist(),
                self._chunk_bytes[rows].tolist(),
                bounds,
                bounds[1:],
            )
        )
        return StoredTensor(shape=tuple(c["shape"][number, :axes].tolist()), dtype=dtype, chunks=chunks)

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __contains__(self, key: object) -> bool:
        return key in self._numbers

    def __len__(self) -> int:
        return len(self.columns["ndim"])

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return int(self._chunk_bytes.sum())


def _require(holds: bool | np.bool_, problem: str) -> None:
    if not holds:
        raise CheckpointCorruptError(f"the manifest contradicts itself: {problem}")
