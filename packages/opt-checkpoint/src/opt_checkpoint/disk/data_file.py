"""Positional reads of data files, checked to belong to the save that the manifest describes, and their checksums.

A checksum is a CRC-32. zlib and `isal` (optional, several times as fast) release the GIL, so a second thread hashes
while the first writes. The checksum of a file is combined from those of its parts without reading it again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from queue import SimpleQueue
from threading import Lock, Thread
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from opt_checkpoint.boxes import row_major_strides
from opt_checkpoint.disk.index import PIECE_BYTES, ByteRange, CheckpointIndex, Kind, Region
from opt_checkpoint.errors import CheckpointCorruptError
from opt_checkpoint.store import store_at

try:
    from isal.isal_zlib import crc32 as _crc32
except ImportError:
    from zlib import crc32 as _crc32

_POLYNOMIAL = 0xEDB88320  # of CRC-32, bit-reversed
_ONE = 1 << 31  # x^0 in that order of bits
HASH_PIECE_BYTES = 16 << 20  # hashed at once; each call takes the interpreter lock again


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
    factor = _ONE  # x^0
    power = _ONE >> 8  # x^8, which is squared for each bit of the length
    while length:
        if length & 1:
            factor = _multiply(factor, power)
        power = _multiply(power, power)
        length = length >> 1
    return factor


def crc32_combine(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC-32 of two concatenated runs of bytes, from the checksum of each.

    Args:
        first: checksum of the first run.
        second: checksum of the second run.
        second_bytes: length of the second run.

    Source: zlib's `crc32_combine`, the algebra of appending zeros to a polynomial remainder.
    """
    return _multiply(_shift_by_bytes(second_bytes), first) ^ second


def bytes_view(tensor: Tensor) -> memoryview:
    """Return a writable view of the memory of a contiguous CPU tensor as bytes."""
    if not tensor.numel():
        return memoryview(b"")
    elements = tensor.detach().as_strided((tensor.numel(),), (1,))  # one may have any stride
    return elements.view(torch.uint8).numpy().data


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
            part = view[: PIECE_BYTES - filled]
            view = view[PIECE_BYTES - filled :]
            if filled:
                self.pieces[-1] = crc32(part, self.pieces[-1])
            else:
                self.pieces.append(crc32(part))
            self.nbytes += len(part)

    @property
    def whole(self) -> int:
        """The CRC-32 of the whole run."""
        if len(self.pieces) == 1:
            return self.pieces[0]
        crc = 0
        left = self.nbytes
        for piece in self.pieces:
            crc = crc32_combine(crc, piece, min(PIECE_BYTES, left))
            left -= PIECE_BYTES
        return crc


def crc32(data: bytes | memoryview, start: int = 0) -> int:
    """CRC-32 of bytes, continuing from `start`."""
    return int(_crc32(data, start))


@contextmanager
def hashing() -> Iterator[Callable[[PieceSums, memoryview], Future[None]]]:
    """Provide a second thread that hashes pieces of memory one after another; it has hashed all when the block ends.

    If no thread can be started, the calling thread hashes.

    Yields:
        A function that adds a piece to sums; its memory may not change until the future is done.
    """
    jobs = SimpleQueue[tuple[PieceSums, memoryview, Future[None]] | None]()

    def add(sums: PieceSums, piece: memoryview, done: Future[None]) -> Future[None]:
        sums.add(piece)
        done.set_result(None)
        return done

    def submit(sums: PieceSums, piece: memoryview) -> Future[None]:
        done = Future[None]()
        jobs.put((sums, piece, done))
        return done

    def work() -> None:
        for job in iter(jobs.get, None):
            add(*job)

    # Not a ThreadPoolExecutor: a save in the background may begin after the main thread has ended.
    thread = Thread(target=work, name="opt-checkpoint-crc", daemon=True)  # Ctrl-C may come before the `try`
    try:
        thread.start()
    except RuntimeError:  # Python 3.12.0 to 3.12.2 start no thread once the script has ended
        yield lambda sums, piece: add(sums, piece, Future())
        return
    try:
        yield submit
    finally:
        jobs.put(None)
        thread.join()


_BOUNCE_BYTES = 32 << 20
FILE_MARK = b"opt-checkpoint data 1 "


def file_header(save_id: str) -> bytes:
    """Return the first 64 bytes of every data file: the file type, and the save it belongs to."""
    return (FILE_MARK + save_id.encode()).ljust(63) + b"\n"


class DataFiles:
    """The data files of a checkpoint, for positional reads by any number of threads. Each is opened on its first read,
    and closed with the last reference.

    Args:
        index: the checkpoint.
    """

    def __init__(self, index: CheckpointIndex) -> None:
        self.path = index.path
        # Files in Hugging Face's cache are symbolic links.
        self._store = store_at(index.path, follow=index.kind is Kind.SAFETENSORS)
        self.near_bytes = self._store.near_bytes
        self.read_bytes = self._store.read_bytes
        self._header = b""
        if index.save_id is not None:
            self._header = file_header(index.save_id)
        self._checked = set[str]()
        self.bytes_read = 0
        self._lock = Lock()

    def read_into(self, name: str, start: int, view: memoryview) -> None:
        """Fill `view` with the bytes of a file from `start` on.

        Raises:
            CheckpointCorruptError: the file is missing, belongs to another save, or ends before.
            OSError: it cannot be read.
        """
        self.check_header(name)
        with self._lock:
            self.bytes_read += len(view)
        self._read(name, start, view)

    def read(self, place: ByteRange) -> bytes:
        """Return the bytes of a range; raises like `read_into`, before memory for them is allocated."""
        name = place.file
        self.check_header(name)
        is_large = place.nbytes > self.read_bytes
        if is_large and place.stop > self._store.sizes([name]).get(name, 0):
            raise self._error(name, f"is truncated: it ends before byte {place.stop}")
        buffer = bytearray(place.nbytes)
        self.read_into(name, place.start, memoryview(buffer))
        return bytes(buffer)

    def check_header(self, name: str) -> None:
        """Raise like `read_into` if a file is missing or belongs to another save."""
        if self._header and name not in self._checked:
            found = bytearray(len(self._header))
            self._read(name, 0, memoryview(found))
            if found != self._header:
                raise self._error(name, "belongs to a different save than the manifest")
            self._checked.add(name)

    def _read(self, name: str, start: int, view: memoryview) -> None:
        try:
            self._store.read_into(name, start, view)
        except FileNotFoundError:
            problem = "is missing; save checkpoints to storage that all ranks can read"
            if self._header and self._store.committed() is None:
                problem += ". Nothing of the checkpoint is there: it was removed in the meantime, or is on another node"
        except EOFError as error:
            problem = f"is truncated: {error}"
        else:
            return
        raise self._error(name, problem)

    def _error(self, name: str, problem: str) -> CheckpointCorruptError:
        return CheckpointCorruptError(f"data file {self.path / name} {problem}")


class Run(NamedTuple):
    """A run of bytes of a data file in memory, and its start in the file."""

    start: int
    raw: memoryview


@dataclass
class CheckedValues:
    """The bytes of one stored chunk, readable at any position and compared with their checksums.

    Each checksum covers a piece of `PIECE_BYTES`. If a read begins or ends inside a piece, the whole piece is read. The
    last such piece is kept, so sequential reads read every byte once.

    Args:
        files: the data files.
        place: the bare values of the chunk; without checksums, they are not compared.
        key: name for error messages.
        ahead: what is already read; None to read the file.
        kept: number and bytes of the last piece.
    """

    files: DataFiles
    place: ByteRange
    key: str
    ahead: Run | None
    kept: tuple[int, memoryview] | None = None

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes of the chunk from `offset` on.

        Raises:
            CheckpointCorruptError: the bytes differ from those that were saved, or the file is not whole.
            OSError: it cannot be read.
        """
        if not self.place.sums:
            self._read(offset, view)
            return
        while len(view):
            number, skipped = divmod(offset, PIECE_BYTES)
            count = min(len(view), self.files.read_bytes)
            count -= count % PIECE_BYTES if offset + count < self.place.nbytes else 0
            if skipped == 0 and count:  # whole pieces, directly
                self._read(offset, view[:count])
                for first in range(0, count, PIECE_BYTES):
                    self._check(number + first // PIECE_BYTES, view[first:count][:PIECE_BYTES])
            else:
                if self.kept is None or self.kept[0] != number:
                    begin = number * PIECE_BYTES
                    piece = memoryview(bytearray(min(PIECE_BYTES, self.place.nbytes - begin)))
                    self._read(begin, piece)
                    self._check(number, piece)
                    self.kept = number, piece
                kept = self.kept[1][skipped:][: len(view)]
                count = len(kept)
                view[:count] = kept
            offset = offset + count
            view = view[count:]

    def _read(self, offset: int, view: memoryview) -> None:
        start = self.place.start + offset
        if self.ahead is None:
            self.files.read_into(self.place.file, start, view)
        else:
            view[:] = self.ahead.raw[start - self.ahead.start :][: len(view)]

    def _check(self, number: int, piece: memoryview) -> None:
        if crc32(piece) != self.place.sums[number]:
            raise damage_of(self.files, self.place, self.key)


def damage_of(files: DataFiles, place: ByteRange, key: str) -> CheckpointCorruptError:
    """Return the error for values that differ from their checksum."""
    return CheckpointCorruptError(f"{files.path / place.file} is damaged: the values of {key} have changed")


def has_right_sums(files: DataFiles, place: ByteRange) -> bool:
    """Read a whole chunk or object, a few megabytes at a time, and compare it with its checksums.

    Raises:
        OSError: it cannot be read.
    """
    sums = PieceSums()
    size = files.read_bytes
    try:
        for start in range(0, place.nbytes, size):
            part = place.part(start, min(size, place.nbytes - start))
            sums.add(memoryview(files.read(part)))
    except CheckpointCorruptError:  # the file is cut, or of another save
        return False
    return place.sums in (tuple(sums.pieces), (sums.whole,))


def read_region(target: Tensor, region: Region, dtype: torch.dtype, values: CheckedValues) -> None:
    """Read a box of a stored chunk into `target`, converting to its dtype and device; writes only `target`.

    It is read directly if both are one run of bytes, else in pieces: this needs at most 32 MB besides the target,
    unless a single row is larger.

    Args:
        target: of the region's shape.
        region: the box of the stored chunk.
        dtype: the stored dtype.
        values: of the chunk.
    """
    first, last = region.span
    position = first * dtype.itemsize
    nbytes = (last - first) * dtype.itemsize
    is_run = last - first == math.prod(region.sizes)
    if is_run and target.dtype == dtype and is_plain_memory(target):
        values.read_into(position, bytes_view(target))
        increment_version(target)  # autograd does not see the write, which others look for
        return
    axis = next((d for d, n in enumerate(region.sizes) if n > 1), 0)  # one value alone is a run, and small
    strides = row_major_strides(region.chunk)
    is_near = is_run
    if not is_run:  # are its rows near to each other?
        low, high = region.rows(axis, 0, 1).span
        is_near = (strides[axis] - (high - low)) * dtype.itemsize <= values.files.near_bytes
    if is_near and nbytes <= _BOUNCE_BYTES:
        raw = memoryview(bytearray(nbytes))  # begins with the first value of the box
        values.read_into(position, raw)
        target.copy_(torch.frombuffer(raw, dtype=dtype).as_strided(region.sizes, strides))
        return
    row_bytes = strides[axis] * dtype.itemsize
    step = 1
    if is_near:
        step = max(1, min(region.sizes[axis] // 2, _BOUNCE_BYTES // row_bytes))
    for row in range(0, region.sizes[axis], step):
        count = min(step, region.sizes[axis] - row)
        read_region(target.narrow(axis, row, count), region.rows(axis, row, count), dtype, values)


def is_plain_memory(target: Tensor) -> bool:
    """Return whether the bytes of a tensor's memory are its values in row-major order."""
    return target.device.type == "cpu" and target.is_contiguous() and not target.is_conj() and not target.is_neg()
