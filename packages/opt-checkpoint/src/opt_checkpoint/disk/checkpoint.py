"""What is at a path: a checkpoint of opt-checkpoint, a stock or Megatron-Core directory, or nothing; its plain values,
and whether its bytes are those that were saved."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

from opt_checkpoint.disk.archives import SafeGlobals, load_object, loaded_whole
from opt_checkpoint.disk.data_file import FILE_MARK, DataFiles, PieceSums, crc32, has_right_sums, hashing
from opt_checkpoint.disk.foreign import MEGATRON_COMMON, METADATA, read_dcp_index
from opt_checkpoint.disk.index import COMMON_KEY, ByteRange, CheckpointIndex, Kind, StoredFile, check_file_name
from opt_checkpoint.disk.main_weights import shifted_mains, shifted_text
from opt_checkpoint.disk.manifest import read_manifest
from opt_checkpoint.errors import CheckpointCorruptError, CheckpointNotFoundError
from opt_checkpoint.store import MANIFEST, AnyPath, Location, Store, location_of, store_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A checkpoint before its tensors are read."""

    index: CheckpointIndex
    common: Any


def read_index(path: AnyPath) -> CheckpointIndex:
    """Return the index of the checkpoint at a path.

    Without a manifest, `.metadata` is read, as stock torch and Megatron-Core write it.

    Args:
        path: the checkpoint's directory, or its place in an object store.

    Raises:
        CheckpointNotFoundError: there is none.
        CheckpointCorruptError: it is damaged.
    """
    where = location_of(path)
    with suppress(FileNotFoundError):
        return read_committed(where)
    store = store_at(where)
    try:
        sizes = store.sizes()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointNotFoundError(f"{where} does not exist, or is not a directory") from None
    if METADATA not in sizes:
        raise CheckpointNotFoundError(f"{where} is not a distributed checkpoint: no {MANIFEST} and no {METADATA} in it")
    for name in sizes:
        if not name.endswith(".distcp"):
            continue
        start = bytearray(min(max(0, sizes[name]), len(FILE_MARK)))
        store.read_into(name, 0, memoryview(start))
        if start == FILE_MARK:
            raise CheckpointCorruptError(f"{where} was written by opt-checkpoint, but its {MANIFEST} is gone")
        if start[8:9] == b"{" and int.from_bytes(start[:8], "little") <= sizes[name]:
            raise CheckpointCorruptError(
                f"{where} was written with SerializationFormat.SAFETENSORS, which is not read; load it with "
                f"torch.distributed.checkpoint and save it by opt_checkpoint.save"
            )
    return read_dcp_index(where, sizes)


def read_committed(path: Location) -> CheckpointIndex:
    """Return the index of a checkpoint of opt-checkpoint.

    Raises:
        CheckpointCorruptError: it is damaged.
        FileNotFoundError: none was committed at the path.
        OSError: it cannot be read.
    """
    store = store_at(path)
    folder = store.committed()
    if folder is None:
        raise FileNotFoundError(errno.ENOENT, "no checkpoint was committed there", str(path))
    try:
        return read_manifest(store.path(folder))
    except FileNotFoundError:
        raise CheckpointCorruptError(f"{path} was committed, but {store.path(folder) / MANIFEST} is gone") from None


def was_removed(path: Location, save_id: str | None) -> bool:
    """Return whether the checkpoint that was read at a path is gone: removed by its trainer, or replaced by another
    save.

    Args:
        path: where it was.
        save_id: the save that was read; None if that is unknown.

    Raises:
        OSError: it cannot be read.
    """
    try:
        found = read_index(path).save_id
    except CheckpointNotFoundError:
        return True
    except CheckpointCorruptError:
        return False
    return save_id is not None and found != save_id


def removed(path: Location) -> CheckpointNotFoundError:
    """Return the error for a checkpoint that was removed while it was read."""
    return CheckpointNotFoundError(
        f"{path} was removed while it was read, as a trainer removes steps that it need not keep. Read a newer step, "
        f"or let the trainer keep more"
    )


def read_common(index: CheckpointIndex, *, safe_globals: SafeGlobals = ()) -> Any:
    """Return the common state: the plain values of the saved state, nested as before; empty if none were stored.

    Args:
        index: the checkpoint.
        safe_globals: classes and functions that may be used to load it, as for `torch.serialization.safe_globals`.

    Returns:
        The values, with None in place of tensors in lists, which are stored as tensors; `load` returns them. In a
        checkpoint that another program wrote, an object of any other class is a `NotLoaded`.

    Raises:
        CheckpointCorruptError: it is damaged, or would need code to be run.
    """
    if COMMON_KEY in index.objects:
        return read_object(index, COMMON_KEY, safe_globals=safe_globals)
    if index.kind is Kind.MEGATRON:
        with suppress(FileNotFoundError):
            return load_object(store_at(index.path).read(MEGATRON_COMMON), allowed=safe_globals)
    return {}


def read_object(index: CheckpointIndex, unique_key: str, *, safe_globals: SafeGlobals = ()) -> Any:
    """Return one stored object; takes and returns values as `read_common`.

    Raises:
        CheckpointCorruptError: it is damaged, or would need code to be run.
    """
    ((_, raw),) = _objects_bytes(DataFiles(index), index, [unique_key])
    value = index.kind.unwrapped(load_object(raw, allowed=safe_globals))
    if index.kind is Kind.OURS:
        return loaded_whole(value, unique_key)
    return value


def read_objects(
    index: CheckpointIndex, keys: Iterable[str], *, safe_globals: SafeGlobals = (), files: DataFiles | None = None
) -> dict[str, Any]:
    """Read many stored objects by key, with few reads. Of equal small ones, such as fields of parameter groups, one is
    loaded and the others are copies of it. `files` counts the bytes.

    Raises:
        CheckpointCorruptError: one is damaged, or would need code to be run.
    """
    first = dict[bytes, Any]()
    loaded = dict[str, Any]()
    for key, raw in _objects_bytes(files or DataFiles(index), index, keys):
        if raw in first:
            loaded[key] = deepcopy(first[raw])
            continue
        loaded[key] = loaded_whole(index.kind.unwrapped(load_object(raw, allowed=safe_globals)), key)
        if len(raw) <= _SMALL_BYTES:
            first[raw] = loaded[key]
    return loaded


def _objects_bytes(files: DataFiles, index: CheckpointIndex, keys: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """The archives of stored objects, compared with their checksums. Those that are near each other are one read."""
    runs: list[tuple[ByteRange, list[str]]] = []
    for key in sorted(keys, key=lambda key: (index.objects[key].file, index.objects[key].start)):
        place = index.objects[key]
        (run, of_run) = runs[-1] if runs else (place, [])
        nbytes = max(run.stop, place.stop) - run.start
        is_near = place.start - run.stop <= files.near_bytes and nbytes <= _BUFFER_BYTES
        if of_run and place.file == run.file and is_near:
            of_run.append(key)
            runs[-1] = run.part(0, nbytes), of_run
        else:
            runs.append((place, [key]))
    with ThreadPoolExecutor(_THREADS) as pool:
        read = pool.map(files.read, [run for run, _ in runs])
        for (run, of_run), raw in zip(runs, read):
            for key in of_run:
                place = index.objects[key]
                part = raw[place.start - run.start :][: place.nbytes]
                if place.sums and crc32(part) != place.sums[0]:
                    raise CheckpointCorruptError(f"{index.path / place.file} is damaged: the object {key} has changed")
                yield key, part


def open_checkpoint(path: AnyPath, *, safe_globals: SafeGlobals = ()) -> Opened:
    """Return index and common state of the checkpoint at a path; raises like `read_index` and `read_common`."""
    index = read_index(path)
    return Opened(index=index, common=read_common(index, safe_globals=safe_globals))


_THREADS = 8  # opening thousands of files on a network file system takes long one by one
_BUFFERS = 4  # at most
_BUFFER_BYTES = 16 << 20  # each, at most
_SMALL_BYTES = 4 << 10  # of objects that are loaded once if they are equal


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
        text = f"{self.file}: {self.problem}"
        if not self.keys:
            return text
        more = " ..." if len(self.keys) > 4 else ""
        return f"{text} ({', '.join(self.keys[:4])}{more})"


def verify_checkpoint(path: AnyPath) -> list[Finding]:
    """Read every byte of a checkpoint, and check it against the manifest, Megatron-Core's `integrity.json`, or the zip
    checksums of stock directories.

    Archives of stock directories may lack the checksums of values, as those that `optckpt convert --to dcp` links do.

    Args:
        path: the checkpoint's directory, or its URL in an object store.

    Returns:
        The problems found; empty for a good checkpoint. At most 64 MB of it are in memory at a time.

    Raises:
        CheckpointNotFoundError: there is no checkpoint, or it was removed while it was read.
    """
    where = location_of(path)
    try:
        index = read_index(where)
    except CheckpointCorruptError as error:
        if was_removed(where, None):
            raise removed(where) from error
        names = store_at(where).sizes()
        is_foreign = METADATA in names and MANIFEST not in names
        return [Finding(METADATA if is_foreign else MANIFEST, str(error))]
    try:
        found = list(_findings(index))
    except (CheckpointCorruptError, FileNotFoundError) as error:
        if was_removed(where, index.save_id):
            raise removed(where) from error
        raise
    if found and was_removed(where, index.save_id):
        raise removed(where)
    return found


def _findings(index: CheckpointIndex) -> Iterator[Finding]:
    """The problems of a checkpoint with this index."""
    places = [(key, chunk.place) for key, stored in index.tensors.items() for chunk in stored.chunks]
    places += index.objects.items()
    files = DataFiles(index)
    if index.save_id is None:  # only the zips of stock files have checksums, which torch never reads
        found = [Finding(name, change) for name, change in _integrity_problems(index.path)]
        for key, place in places:
            if problem := _archive_problem(files.read(place)):
                found.append(Finding(place.file, problem, (key,)))
        if not found and index.kind is Kind.MEGATRON and (keys := shifted_mains(index, whole=True)):
            found.append(Finding(METADATA, f"lists {shifted_text(keys)}", tuple(keys)))
        yield from found
        return
    for name, problem in _damage(index.path, index.files):
        of_file = [(key, place) for key, place in places if problem == _CHANGED and place.file == name]
        damaged = dict.fromkeys(key for key, place in of_file if not has_right_sums(files, place))
        yield Finding(name, problem, tuple(damaged))
    for name in sorted(store_at(index.path).sizes()):
        if name not in index.files and name.endswith(".distcp"):
            yield Finding(name, "does not belong to this checkpoint")


_INTEGRITY = "integrity.json"  # of Megatron-Core: the SHA-256 of every other file, if `save` was asked for it


def _integrity_problems(path: Location) -> Iterator[tuple[str, str]]:
    """Name and problem of each file that differs from what Megatron-Core recorded. Reads the files."""
    store = store_at(path)
    sizes = store.sizes()
    if _INTEGRITY not in sizes:
        return
    try:
        recorded = json.loads(store.read(_INTEGRITY))
        algorithm = recorded["algorithm"]
        files = dict(recorded["files"])
        for name in files:
            check_file_name(name)
    except (CheckpointCorruptError, ValueError, TypeError, KeyError) as error:
        yield _INTEGRITY, f"is damaged: {error}"
        return
    if algorithm != "sha256":
        yield _INTEGRITY, f"has checksums of {algorithm!r}, which is not known; allowed: sha256"
        return
    for name, expected in files.items():
        if sizes.get(name, -1) < 0:
            yield name, f"is missing; {_INTEGRITY} lists it"
            continue
        digest = hashlib.sha256()
        for start in range(0, sizes[name], _BUFFER_BYTES):
            buffer = bytearray(min(_BUFFER_BYTES, sizes[name] - start))
            store.read_into(name, start, memoryview(buffer))
            digest.update(buffer)
        if digest.hexdigest() != expected:
            yield name, f"has changed: its SHA-256 in {_INTEGRITY} is another"


def first_damage(path: Location, files: Mapping[str, StoredFile]) -> str | None:
    """Read files of a checkpoint whole; the problem of the first one that differs from its checksum, else None.

    Args:
        path: the folder of the checkpoint.
        files: size and checksum of the files, by name.

    Raises:
        OSError: a file cannot be read.
    """
    return next((f"{name}: {problem}" for name, problem in _damage(path, files)), None)


_CHANGED = "has changed: its checksum is wrong"


def _damage(path: Location, files: Mapping[str, StoredFile]) -> Iterator[tuple[str, str]]:
    """Name and problem of each file that is missing, or has another size or checksum. Reads the files."""
    store = store_at(path)
    problems = size_problems(path, files)
    for name, file in files.items():
        try:
            if name in problems:
                yield name, problems[name]
            elif _crc_of(store, name, file.size) != file.crc:
                yield name, _CHANGED
        except (FileNotFoundError, EOFError, CheckpointCorruptError) as error:  # changed in the meantime
            yield name, str(error)


def check_sizes(index: CheckpointIndex, *, headers: bool = True) -> None:
    """Raise `CheckpointCorruptError` if a file is missing, has another size, or, by its header, is of another save."""
    for name, problem in size_problems(index.path, index.files).items():
        raise CheckpointCorruptError(f"{index.path} is damaged: {name}: {problem}")
    names = [name for name in index.files if headers and name.endswith(".distcp")]
    files = DataFiles(index)
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(files.check_header, names))  # raises the first error


def size_problems(path: Location, files: Mapping[str, StoredFile]) -> dict[str, str]:
    """Return the problems of files in a folder, by name, without opening the files.

    Raises:
        OSError: the sizes cannot be read.
    """
    stored = store_at(path).sizes(files)
    problems = {}
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
    hashed = list[Future[None]]()
    sums = PieceSums()
    with hashing() as submit:
        for number, start in enumerate(range(0, size, step)):
            if number >= _BUFFERS:
                hashed[number - _BUFFERS].result()  # its buffer is free again
            part = buffers[number % _BUFFERS][: min(step, size - start)]
            store.read_into(name, start, part)
            hashed.append(submit(sums, part))
    return sums.whole


def _archive_problem(raw: bytes) -> str | None:
    try:
        load_object(raw)
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            for entry in archive.infolist():
                if entry.CRC:  # tensors that we wrote have the checksum 0: unknown
                    archive.read(entry)
    except Exception as error:  # zipfile raises many exception types on damaged archives
        return f"holds a damaged archive: {error}"
    return None
