"""Verifies that the bytes on disk are the bytes that were saved."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from opt_checkpoint.disk.checked_values import check_bytes
from opt_checkpoint.disk.checksums import PieceSums
from opt_checkpoint.disk.data_file import DataFiles
from opt_checkpoint.disk.dcp_metadata import METADATA
from opt_checkpoint.disk.detect import read_index
from opt_checkpoint.disk.hasher import Hasher
from opt_checkpoint.disk.index import CheckpointIndex, StoredFile
from opt_checkpoint.disk.stored_objects import load_object
from opt_checkpoint.disk.torch_zip_reader import check_archive_size
from opt_checkpoint.errors import CheckpointCorruptError
from opt_checkpoint.store import MANIFEST, AnyPath, Location, Store, location_of, store_at

_THREADS = 8  # opening thousands of files on a network file system takes long one by one
_BUFFERS, _BUFFER_BYTES = 4, 16 << 20  # at most, of each


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
        store = store_at(location_of(path))
        damaged = MANIFEST if METADATA not in store.sizes() or MANIFEST in store.sizes() else METADATA
        return [Finding(damaged, str(error))]
    if index.save_id is None:
        return list(_check_archives(index))
    return [*_check_files(index), *_check_unlisted(index)]


def first_damage(path: Location, files: Mapping[str, StoredFile]) -> str | None:
    """Read files of a checkpoint whole; the problem of the first one that differs from its checksum, else None.

    Args:
        path: the folder of the checkpoint.
        files: size and checksum of the files, by name.

    Raises:
        OSError: a file cannot be read.
    """
    store = store_at(path)
    problems = _size_problems(store, files)
    for name, file in files.items():
        if name in problems:
            return f"{name}: it {problems[name]}"
        try:
            if _crc_of(store, name, file.size) != file.crc:
                return f"{name} has changed: its checksum is wrong"
        except (FileNotFoundError, EOFError, CheckpointCorruptError) as error:  # changed in the meantime
            return f"{name}: {error}"
    return None


def check_sizes(index: CheckpointIndex) -> None:
    """Raise `CheckpointCorruptError` if a file is missing, has another size, or belongs to another save."""
    for name, problem in size_problems(index).items():
        raise CheckpointCorruptError(f"{index.path} is damaged: {name}: {problem}")
    names, files = [name for name in index.files if name.endswith(".distcp")], DataFiles(index)
    with ThreadPoolExecutor(_THREADS) as pool:
        for done in [pool.submit(files[name].check_header) for name in names]:
            done.result()


def size_problems(index: CheckpointIndex) -> dict[str, str]:
    """Return the problems of files, by name, without opening the files.

    Raises:
        OSError: the sizes cannot be read.
    """
    return _size_problems(store_at(index.path), index.files)


def _size_problems(store: Store, files: Mapping[str, StoredFile]) -> dict[str, str]:
    stored, problems = store.sizes(names=files), {}
    for name, file in files.items():
        size = stored.get(name)
        if size is None:
            problems[name] = "is missing"
        elif size < 0:
            problems[name] = "is not a regular file"
        elif size != file.size:
            problems[name] = f"has {size} bytes, {file.size} were saved"
    return problems


def _check_files(index: CheckpointIndex) -> Iterator[Finding]:
    """Hash each file as a whole; if it is damaged, hash its items to name the damaged ones."""
    store, wrong = store_at(index.path), size_problems(index)
    for name, file in index.files.items():
        if name in wrong:
            yield Finding(name, wrong[name])
        elif _crc_of(store, name, file.size) != file.crc:
            yield Finding(name, "has changed: its checksum is wrong", _damaged_keys(index, name))


def _crc_of(store: Store, name: str, size: int) -> int:
    """The checksum of a file. One thread reads into a ring of buffers while another hashes the previous ones."""
    step = min(store.read_bytes, _BUFFER_BYTES)
    buffers, hashed, sums = (
        [memoryview(bytearray(min(step, size))) for _ in range(_BUFFERS)],
        list[Future[None]](),
        PieceSums(),
    )
    with Hasher() as hasher:
        for number, start in enumerate(range(0, size, step)):
            if number >= _BUFFERS:
                hashed[number - _BUFFERS].result()  # its buffer is free again
            part = buffers[number % _BUFFERS][: min(step, size - start)]
            store.read_into(name, start, part)
            hashed.append(hasher.submit(part, sums))
    return sums.whole


def _damaged_keys(index: CheckpointIndex, name: str) -> tuple[str, ...]:
    places = [(k, c.place) for k, t in index.tensors.items() for c in t.chunks] + list(index.objects.items())
    damaged = []
    files = DataFiles(index)
    for key, place in places:
        try:
            if place.file == name:
                check_bytes(files[name], place, key)
        except CheckpointCorruptError:
            damaged.append(key)
    return tuple(dict.fromkeys(damaged))


def _check_unlisted(index: CheckpointIndex) -> Iterator[Finding]:
    """Report data files that are not in the manifest, which another save must have written."""
    for name in sorted(store_at(index.path).sizes()):
        if name not in index.files and name.endswith(".distcp"):
            yield Finding(name, "does not belong to this checkpoint")


def _check_archives(index: CheckpointIndex) -> Iterator[Finding]:
    """Check the checksums in the zips of stock files, which torch never reads."""
    places = [(k, c.place) for k, t in index.tensors.items() for c in t.chunks] + list(index.objects.items())
    files = DataFiles(index)
    for key, place in places:
        problem = _archive_problem(files[place.file].read(place.start, place.nbytes))
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
