"""CRC-32 of items and of files in one pass: pieces are hashed separately and their checksums combined.

zlib and `isal` (optional, several times as fast) release the GIL, so a second thread hashes while the first writes. The
checksum of a file is combined from those of its parts without reading it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from functools import lru_cache
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor

try:
    from isal.isal_zlib import crc32 as _crc32
except ImportError:
    from zlib import crc32 as _crc32

_POLYNOMIAL = 0xEDB88320  # of CRC-32, bit-reversed
_ONE = 1 << 31  # x^0 in that order of bits
HASH_PIECE_BYTES = 16 << 20  # hashed at once; each call takes the interpreter lock again
PIECE_BYTES = 1 << 20  # the manifest has a checksum of each run of this many bytes of a stored tensor


def _multiply(a: int, b: int) -> int:
    """a * b modulo the CRC polynomial."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@lru_cache(maxsize=64)
def _x_to_power_of_two(k: int) -> int:
    """x^(2^k) modulo the polynomial."""
    return 1 << 30 if k == 0 else _multiply(_x_to_power_of_two(k - 1), _x_to_power_of_two(k - 1))


@lru_cache(maxsize=256)
def _shift_by_bytes(length: int) -> int:
    """x^(8 * length) modulo the polynomial: the factor by which `length` more bytes change a checksum."""
    factor, k = _ONE, 3
    while length:
        if length & 1:
            factor = _multiply(factor, _x_to_power_of_two(k))
        length >>= 1
        k += 1
    return factor


def crc32_combine(first: int, second: int, second_bytes: int) -> int:
    """The CRC-32 of two concatenated runs of bytes, from the checksum of each.

    Args:
        first: checksum of the first run.
        second: checksum of the second run.
        second_bytes: length of the second run.

    Source: zlib's `crc32_combine`, the algebra of appending zeros to a polynomial remainder.
    """
    return _multiply(_shift_by_bytes(second_bytes), first) ^ second


def bytes_view(tensor: Tensor) -> memoryview:
    """A writable view of the memory of a contiguous CPU tensor as bytes."""
    if not tensor.numel():
        return memoryview(b"")
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy().data).cast("B")


def pieces(view: memoryview, size: int = HASH_PIECE_BYTES) -> Iterator[memoryview]:
    """Runs of at most `size` bytes."""
    return (view[i : i + size] for i in range(0, len(view), size))


class PieceSums:
    """The CRC-32 of every `PIECE_BYTES` of a run of bytes, which is added in order, in parts of any size."""

    __slots__ = ("nbytes", "pieces")

    def __init__(self) -> None:
        self.pieces: list[int] = []
        self.nbytes = 0

    def add(self, view: memoryview) -> None:
        """Add more bytes."""
        while len(view):
            filled = self.nbytes % PIECE_BYTES
            part, view = view[: PIECE_BYTES - filled], view[PIECE_BYTES - filled :]
            if filled:
                self.pieces[-1] = crc32(part, self.pieces[-1])
            else:
                self.pieces.append(crc32(part))
            self.nbytes += len(part)

    @property
    def whole(self) -> int:
        """The CRC-32 of the whole run."""
        if len(self.pieces) <= 1:
            return self.pieces[0] if self.pieces else 0
        crc, left = 0, self.nbytes
        for piece in self.pieces:
            crc = crc32_combine(crc, piece, min(PIECE_BYTES, left))
            left -= PIECE_BYTES
        return crc


def crc32(data: bytes | memoryview, start: int = 0) -> int:
    """CRC-32 of bytes, continuing from `start`."""
    return int(_crc32(data, start))


class _Job(NamedTuple):
    piece: memoryview
    sums: PieceSums
    done: Future[None]


class Hasher:
    """Hashes pieces of memory one after another, during a `with` block."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name="opt-checkpoint-crc")

    def __enter__(self) -> Hasher:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._jobs.put(None)
        self._thread.join()

    def submit(self, piece: memoryview, sums: PieceSums) -> Future[None]:
        """Add a piece to `sums`; the memory may not change until the future is done."""
        job = _Job(piece, sums, Future())
        self._jobs.put(job)
        return job.done

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.sums.add(job.piece)
            job.done.set_result(None)
