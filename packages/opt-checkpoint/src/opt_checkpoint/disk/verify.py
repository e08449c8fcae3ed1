"""Verifies that the bytes on disk are the bytes that were saved."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from opt_checkpoint.disk.checksums import Hasher, PieceSums
from opt_checkpoint.disk.data_file import DataFile, DataFiles, check_bytes
from opt_checkpoint.disk.dcp_metadata import METADATA
from opt_checkpoint.disk.detect import read_index
from opt_checkpoint.disk.index import ByteRange, CheckpointIndex, StoredFile
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
        names = store_at(location_of(path)).sizes()
        return [Finding(METADATA if METADATA in names and MANIFEST not in names else MANIFEST, str(error))]
    places = [(k, c.place) for k, t in index.tensors.items() for c in t.chunks] + list(index.objects.items())
    files, found = DataFiles(index), []
    if index.save_id is None:  # only the zips of stock files have checksums, which torch never reads
        for key, place in places:
            problem = _archive_problem(files[place.file].read(place.start, place.nbytes))
            found += [Finding(place.file, problem, (key,))] if problem else []
        return found
    store, wrong = store_at(index.path), size_problems(index)
    for name, file in index.files.items():
        if name in wrong:
            found.append(Finding(name, wrong[name]))
        elif _crc_of(store, name, file.size) != file.crc:
            damaged = [key for key, place in places if place.file == name and _is_damaged(files[name], place, key)]
            found.append(Finding(name, "has changed: its checksum is wrong", tuple(dict.fromkeys(damaged))))
    for name in sorted(store.sizes()):
        if name not in index.files and name.endswith(".distcp"):
            found.append(Finding(name, "does not belong to this checkpoint"))
    return found


def _is_damaged(file: DataFile, place: ByteRange, key: str) -> bool:
    try:
        check_bytes(file, place, key)
    except CheckpointCorruptError:
        return True
    return False


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


def _crc_of(store: Store, name: str, size: int) -> int:
    """The checksum of a file. One thread reads into a ring of buffers while another hashes the previous ones."""
    step = min(store.read_bytes, _BUFFER_BYTES)
    buffers = [memoryview(bytearray(min(step, size))) for _ in range(_BUFFERS)]
    hashed, sums = list[Future[None]](), PieceSums()
    with Hasher() as hasher:
        for number, start in enumerate(range(0, size, step)):
            if number >= _BUFFERS:
                hashed[number - _BUFFERS].result()  # its buffer is free again
            part = buffers[number % _BUFFERS][: min(step, size - start)]
            store.read_into(name, start, part)
            hashed.append(hasher.submit(part, sums))
    return sums.whole


def _archive_problem(raw: bytes) -> str | None:
    try:
        check_archive_size(raw)
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            for entry in archive.infolist():
                if entry.CRC:  # large tensors that we wrote have the checksum 0: unknown
                    archive.read(entry)
        load_object(raw)
    except Exception as error:  # zipfile raises many exception types on damaged archives
        return f"holds a damaged archive: {error}"
    return None
