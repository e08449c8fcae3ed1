"""CRC-32 of items and of files in one pass: pieces are hashed separately and their checksums combined.

zlib and `isal` (optional, several times as fast) release the GIL, so a second thread hashes while the first writes. The
checksum of a file is combined from those of its parts without reading it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import lru_cache
from queue import SimpleQueue
from threading import Thread

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


@lru_cache(maxsize=256)
def _shift_by_bytes(length: int) -> int:
    """x^(8 * length) modulo the polynomial: the factor by which `length` more bytes change a checksum."""
    factor, power = _ONE, _ONE >> 8  # x^0 and x^8, which is squared for each bit of the length
    while length:
        if length & 1:
            factor = _multiply(factor, power)
        power, length = _multiply(power, power), length >> 1
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


@contextmanager
def hashing() -> Iterator[Callable[[PieceSums, memoryview], Future[None]]]:
    """A second thread that hashes pieces of memory one after another; it has hashed all when the block ends.

    Yields:
        A function that adds a piece to sums; its memory may not change until the future is done.
    """
    jobs = SimpleQueue[tuple[PieceSums, memoryview, Future[None]] | None]()

    def submit(sums: PieceSums, piece: memoryview) -> Future[None]:
        done = Future[None]()
        jobs.put((sums, piece, done))
        return done

    def work() -> None:
        while (job := jobs.get()) is not None:
            sums, piece, done = job
            sums.add(piece)
            done.set_result(None)

    # Not a ThreadPoolExecutor: a save in the background may begin after the main thread has ended.
    thread = Thread(target=work, name="opt-checkpoint-crc", daemon=True)  # Ctrl-C may come before the `try`
    thread.start()
    try:
        yield submit
    finally:
        jobs.put(None)
        thread.join()
