"""Reads values and compares them with their checksums in one pass."""

from __future__ import annotations

from opt_checkpoint.disk.checksums import PIECE_BYTES, PieceSums, crc32
from opt_checkpoint.disk.data_file import DataFile
from opt_checkpoint.disk.index import ByteRange
from opt_checkpoint.errors import CheckpointCorruptError


class CheckedValues:
    """The bytes of one stored chunk, readable at any position and compared with their checksums.

    Each checksum covers a piece of `PIECE_BYTES`. If a read begins or ends inside a piece, the whole piece is read. The
    last such piece is kept, so sequential reads read every byte once.

    Args:
        file: the data file.
        place: the chunk in it; bare values, or an archive without checksums.
        key: name for error messages.
    """

    def __init__(self, file: DataFile, place: ByteRange, key: str) -> None:
        self._file, self._place, self._key = file, place, key
        self.near_bytes = file.near_bytes
        small = place.crc is not None and place.nbytes <= PIECE_BYTES
        self._pieces = place.pieces or ((place.crc,) if small and place.crc is not None else ())
        self._kept: tuple[int, memoryview] | None = None

    def read_into(self, start: int, view: memoryview) -> None:
        """Fill `view` with the bytes of the file from `start` on, a position in the file.

        Raises:
            CheckpointCorruptError: the bytes differ from those that were saved, or the file is not whole.
            OSError: it cannot be read.
        """
        if self._pieces:
            self._read_pieces(start - self._place.start, view)
        else:
            self._file.read_into(start, view)

    def _read_pieces(self, offset: int, view: memoryview) -> None:
        while len(view):
            number, skipped = divmod(offset, PIECE_BYTES)
            if skipped == 0 and (len(view) >= PIECE_BYTES or offset + len(view) == self._place.nbytes):
                count = self._read_aligned(number, view)
            else:
                kept = self._piece(number)[skipped:][: len(view)]
                count = len(kept)
                view[:count] = kept
            offset, view = offset + count, view[count:]

    def _read_aligned(self, number: int, view: memoryview) -> int:
        """Read whole pieces directly into `view`. Returns the number of bytes."""
        offset = number * PIECE_BYTES
        count = min(len(view), self._file.read_bytes)
        if offset + count != self._place.nbytes:
            count -= count % PIECE_BYTES
        self._file.read_into(self._place.start + offset, view[:count])
        for start in range(0, count, PIECE_BYTES):
            self._check(number, view[start:count][:PIECE_BYTES])
            number += 1
        return count

    def _piece(self, number: int) -> memoryview:
        """A piece of which a part is requested."""
        if self._kept is None or self._kept[0] != number:
            start = number * PIECE_BYTES
            piece = memoryview(bytearray(min(PIECE_BYTES, self._place.nbytes - start)))
            self._file.read_into(self._place.start + start, piece)
            self._check(number, piece)
            self._kept = number, piece
        return self._kept[1]

    def _check(self, number: int, piece: memoryview) -> None:
        if crc32(piece) != self._pieces[number]:
            raise CheckpointCorruptError(f"{self._file.path} is damaged: the values of {self._key} have changed")


def check_bytes(file: DataFile, place: ByteRange, key: str) -> None:
    """Read a whole chunk or object, a few megabytes at a time, and compare it with its checksums.

    Raises:
        CheckpointCorruptError: the bytes differ from those that were saved, or the file is not whole.
        OSError: it cannot be read.
    """
    sums = PieceSums()
    size = file.read_bytes
    for start in range(0, place.nbytes, size):
        sums.add(memoryview(file.read(place.start + start, min(size, place.nbytes - start))))
    right = tuple(sums.pieces) == place.pieces if place.pieces else sums.whole == place.crc
    if not right:
        raise CheckpointCorruptError(f"{file.path} is damaged: the values of {key} have changed")
