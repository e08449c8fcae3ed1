"""Verifies that the bytes on disk are the bytes that were saved."""

from __future__ import annotations

import io
import os
import stat
import zipfile
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import NamedTuple

from opt_checkpoint.disk.checked_values import check_bytes
from opt_checkpoint.disk.checksums import PieceSums
from opt_checkpoint.disk.data_file import DataFiles, open_regular
from opt_checkpoint.disk.dcp_metadata import METADATA
from opt_checkpoint.disk.detect import read_index
from opt_checkpoint.disk.hasher import Hasher
from opt_checkpoint.disk.index import CheckpointIndex, StoredFile
from opt_checkpoint.disk.manifest import MANIFEST
from opt_checkpoint.disk.object_data_file import ObjectDataFile
from opt_checkpoint.disk.object_target import stored_sizes
from opt_checkpoint.disk.stored_objects import load_object
from opt_checkpoint.disk.torch_zip_reader import check_archive_size
from opt_checkpoint.errors import CheckpointCorruptError
from opt_checkpoint.objects.path import AnyPath, Location, ObjectPath, location_of

_THREADS = 8  # opening thousands of files on a network file system takes long one by one
_BUFFERS, _BUFFER_BYTES = 4, 2 << 20
_OBJECT_BYTES = 16 << 20


class Finding(NamedTuple):
    """A problem of a checkpoint.

    Args:
        file: name of the file within the checkpoint.
        problem: what is wrong with it.
        keys: the stored tensors and objects that are damaged, where known.
    """

    file: str
    problem: str
    keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        keys = f" ({', '.join(self.keys[:4])}{' ...' if len(self.keys) > 4 else ''})" if self.keys else ""
        return f"{self.file}: {self.problem}{keys}"


def verify_checkpoint(path: AnyPath) -> list[Finding]:
    """Read every byte of a checkpoint, and check it against the manifest, or the zip checksums of stock directories.

    Args:
        path: the checkpoint's directory, or its URL in an object store.

    Returns:
        The problems found; empty for a good checkpoint. At most 64 MB of it are in memory at a time.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
    """
    try:
        index = read_index(path)
    except CheckpointCorruptError as error:
        return [Finding(_damaged_name(location_of(path)), str(error))]
    if index.save_id is None:
        return list(_check_archives(index))
    return [*_check_sizes(index), *_check_files(index), *_check_unlisted(index)]


def first_damage(path: Location, files: Mapping[str, StoredFile]) -> str | None:
    """Read files of a checkpoint whole; the problem of the first one that differs from its checksum, else None.

    Raises:
        OSError: a file cannot be read.
    """
    for name, file in files.items():
        try:
            if _crc_of(path / name, file.size) != file.crc:
                return f"{name} has changed: its checksum is wrong"
        except CheckpointCorruptError as error:
            return f"{name}: {error}"
    return None


def _crc_of(path: Location, size: int) -> int:
    return _object_crc(path, size) if isinstance(path, ObjectPath) else _file_crc(path)


def _damaged_name(path: Location) -> str:
    """The file that could not be read as an index."""
    if isinstance(path, ObjectPath):
        return MANIFEST
    return MANIFEST if os.path.lexists(path / MANIFEST) else METADATA


def check_sizes(index: CheckpointIndex) -> None:
    """Raise `CheckpointCorruptError` if a file is missing, has another size, or belongs to another save."""
    findings = list(_check_sizes(index))
    if findings:
        raise CheckpointCorruptError(f"{index.path} is damaged: {findings[0]}")
    names = [name for name in index.files if name.endswith(".distcp")]
    with DataFiles(index) as files, ThreadPoolExecutor(_THREADS) as pool:
        for done in [pool.submit(files[name].check_header) for name in names]:
            done.result()


def _check_sizes(index: CheckpointIndex) -> Iterator[Finding]:
    for name, problem in size_problems(index).items():
        yield Finding(name, problem)


def size_problems(index: CheckpointIndex) -> dict[str, str]:
    """Return the problems of files, by name, without opening the files.

    Raises:
        OSError: the sizes cannot be read.
    """
    path, sizes = index.path, {name: file.size for name, file in index.files.items()}
    if isinstance(path, ObjectPath):
        stored = stored_sizes(path, list(sizes))
        problems = {name: _difference(stored.get(name), size) for name, size in sizes.items()}
    else:
        problems = {name: _size_problem(path / name, size) for name, size in sizes.items()}
    return {name: problem for name, problem in problems.items() if problem}


def _size_problem(path: Path, size: int) -> str | None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return _difference(None, size)
    if not stat.S_ISREG(found.st_mode):
        return "is not a regular file"
    return _difference(found.st_size, size)


def _difference(found: int | None, size: int) -> str | None:
    """The problem with the size of a file; `found` is None if the file is missing."""
    if found is None:
        return "is missing"
    return None if found == size else f"has {found} bytes, {size} were saved"


def _check_files(index: CheckpointIndex) -> Iterator[Finding]:
    """Hash each file as a whole; if it is damaged, hash its items to name the damaged ones."""
    wrong = size_problems(index)
    for name, file in index.files.items():
        if name in wrong:
            continue
        if _crc_of(index.path / name, file.size) != file.crc:
            yield Finding(name, "has changed: its checksum is wrong", _damaged_keys(index, name))


def _object_crc(path: ObjectPath, size: int) -> int:
    file, sums = ObjectDataFile(path, None), PieceSums()
    for start in range(0, size, _OBJECT_BYTES):
        sums.add(memoryview(file.read(start, min(_OBJECT_BYTES, size - start))))
    return sums.whole


def _file_crc(path: Path) -> int:
    """The checksum of a file. One thread reads into a ring of buffers while another hashes the previous ones."""
    buffers, hashed, sums = [bytearray(_BUFFER_BYTES) for _ in range(_BUFFERS)], list[Future[None]](), PieceSums()
    with Hasher() as hasher, open(open_regular(path), "rb", buffering=0) as stream:
        for number in count():
            if number >= _BUFFERS:
                hashed[number - _BUFFERS].result()  # its buffer is free again
            buffer = buffers[number % _BUFFERS]
            size = stream.readinto(buffer)
            if not size:
                break
            hashed.append(hasher.submit(memoryview(buffer)[:size], sums))
    return sums.whole


def _damaged_keys(index: CheckpointIndex, name: str) -> tuple[str, ...]:
    places = [(k, c.place) for k, t in index.tensors.items() for c in t.chunks] + list(index.objects.items())
    damaged = []
    with DataFiles(index) as files:
        for key, place in places:
            try:
                if place.file == name:
                    check_bytes(files[name], place, key)
            except CheckpointCorruptError:
                damaged.append(key)
    return tuple(dict.fromkeys(damaged))


def _check_unlisted(index: CheckpointIndex) -> Iterator[Finding]:
    """Report data files that are not in the manifest, which another save must have written."""
    path = index.path
    names = path.listing() if isinstance(path, ObjectPath) else [entry.name for entry in path.iterdir()]
    for name in sorted(names):
        if name not in index.files and name.endswith(".distcp"):
            yield Finding(name, "does not belong to this checkpoint")


def _check_archives(index: CheckpointIndex) -> Iterator[Finding]:
    """Check the checksums in the zips of stock files, which torch never reads."""
    places = [(k, c.place) for k, t in index.tensors.items() for c in t.chunks] + list(index.objects.items())
    with DataFiles(index) as files:
        for key, place in places:
            raw = files[place.file].read(place.start, place.nbytes)
            problem = _archive_problem(raw)
            if problem:
                yield Finding(place.file, problem, (key,))


def _archive_problem(raw: bytes) -> str | None:
    try:
        check_archive_size(raw)
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            bad = _first_changed(archive)
        load_object(raw)
    except Exception as error:  # zipfile raises many exception types on damaged archives
        return f"holds a damaged archive: {error}"
    return None if bad is None else f"holds a damaged archive: {bad} has changed"


def _first_changed(archive: zipfile.ZipFile) -> str | None:
    """The first entry that does not match its checksum. Large tensors that we wrote have the checksum 0: unknown."""
    for entry in archive.infolist():
        try:
            if entry.CRC:
                archive.read(entry)
        except zipfile.BadZipFile:
            return entry.filename
    return None
