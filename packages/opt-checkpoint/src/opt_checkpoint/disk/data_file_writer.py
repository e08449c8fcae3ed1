"""The bytes of one data file in order, while a second thread computes checksums.

Nothing that was written is changed later: the checksums of large tensors go to the manifest, and their archives have
the checksum 0, which torch never compares. With a spare core, hashing therefore costs no time. The bytes can be read
again from the start, because an upload that fails is repeated as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from torch import Tensor

from opt_checkpoint.disk.checksums import HASH_PIECE_BYTES, Hasher, PieceSums, bytes_view, crc32, crc32_combine, pieces
from opt_checkpoint.disk.index import StoredFile
from opt_checkpoint.disk.read_region import is_plain_memory
from opt_checkpoint.disk.torch_zip_reader import contiguous
from opt_checkpoint.disk.torch_zip_writer import frame_tensor

ALIGNMENT = 64  # of stored values in their file, as of tensors in memory
_SMALL_BYTES = 256 << 10
_BUFFER_BYTES = 4 << 20


class Placed(NamedTuple):
    """An item in the file.

    Args:
        key: its key.
        start: first byte of its archive.
        end: end of its archive.
        values_start: first byte of its values; -1 for an object.
        sums: the CRC-32 of each piece of its values.
    """

    key: str
    start: int
    end: int
    values_start: int
    sums: list[int]


class DataFileWriter:
    """The bytes of a data file, in parts; each call begins again.

    Args:
        header: the first bytes.
        objects: returns keys and bytes of the objects.
        tensors: returns keys and values of the tensors.
    """

    def __init__(
        self,
        header: bytes,
        objects: Callable[[], Iterable[tuple[str, bytes]]],
        tensors: Callable[[], Iterable[tuple[str, Tensor]]],
    ) -> None:
        self._header, self._objects, self._tensors = header, objects, tensors
        self._start()

    def _start(self) -> None:
        self.placed: list[Placed] = []
        self._sums: list[tuple[int | PieceSums, int]] = []  # checksum and length of each run of the file
        self._gathered = bytearray(self._header)
        self._given = 0  # bytes

    def __call__(self) -> Iterator[memoryview]:
        self._start()
        with Hasher() as hasher:
            for key, raw in self._objects():
                start = self._position
                self._gathered += raw
                self.placed.append(Placed(key, start, self._position, -1, [crc32(raw)]))
                yield from self._flushed(_BUFFER_BYTES)
            for key, values in self._tensors():
                yield from self._tensor(hasher, key, values)
            yield from self._flushed()

    @property
    def _position(self) -> int:
        return self._given + len(self._gathered)

    def _tensor(self, hasher: Hasher, key: str, values: Tensor) -> Iterator[memoryview]:
        """The archive of a tensor, preceded by zeros that align its values."""
        framing = frame_tensor(values.dtype, tuple(values.shape))
        gap = -(self._position + len(framing.before)) % ALIGNMENT
        start = self._position + gap
        values_start = start + len(framing.before)
        if values.numel() * values.element_size() <= _SMALL_BYTES:
            view = bytes_view(values if is_plain_memory(values) else contiguous(values))
            sums = [crc32(view)]
            before, after = framing.with_sum(sums[0])
            self._gathered += b"".join((bytes(gap), before, view, after))
        else:
            self._gathered += bytes(gap) + framing.before
            yield from self._flushed()
            hashed = PieceSums()
            yield from self._large(hasher, values, hashed)
            sums = hashed.pieces  # complete once the hasher has ended
            self._gathered += framing.after
        self.placed.append(Placed(key, start, self._position, values_start, sums))
        yield from self._flushed(_BUFFER_BYTES)

    def _large(self, hasher: Hasher, values: Tensor, sums: PieceSums) -> Iterator[memoryview]:
        """Values in row-major order: directly if they are stored in this order, else through bounded copies."""
        is_plain = is_plain_memory(values)
        for part in [values] if is_plain else _bounded_parts(values):
            for piece in pieces(bytes_view(contiguous(part))):
                done = hasher.submit(piece, sums)
                yield piece
                self._given += len(piece)
            if not is_plain:
                done.result()  # frees this copy before the next is made
        self._sums.append((sums, values.numel() * values.element_size()))

    def _flushed(self, minimum: int = 1) -> Iterator[memoryview]:
        """The gathered bytes, if there are at least `minimum`."""
        if len(self._gathered) >= minimum:
            view = memoryview(bytes(self._gathered))
            self._sums.append((crc32(view), len(view)))
            self._gathered.clear()
            self._given += len(view)
            yield view

    def written(self) -> StoredFile:
        """Size and CRC-32 of the file, after all parts were read."""
        total = 0
        for sums, nbytes in self._sums:
            total = crc32_combine(total, sums if isinstance(sums, int) else sums.whole, nbytes)
        return StoredFile(size=self._given, crc=total)


def _bounded_parts(data: Tensor) -> list[Tensor]:
    """Runs of rows of a tensor, each of a few hash pieces at most, so that a copy of one needs little memory."""
    axis = next((d for d, n in enumerate(data.shape) if n > 1), 0)
    rows = data.shape[axis]
    row_bytes = data.numel() // rows * data.element_size()
    step = max(1, 2 * HASH_PIECE_BYTES // max(1, row_bytes))
    return [data.narrow(axis, i, min(step, rows - i)) for i in range(0, rows, step)]
