"""Positional reads of data files, which are checked to belong to the save that the manifest describes."""

from __future__ import annotations

from threading import Lock

from opt_checkpoint.disk.index import CheckpointIndex, Kind
from opt_checkpoint.errors import CheckpointCorruptError
from opt_checkpoint.store import Location, Store, store_at

FILE_MARK = b"opt-checkpoint data 1 "


def file_header(save_id: str) -> bytes:
    """The first 64 bytes of every data file: the file type, and the save it belongs to."""
    return (FILE_MARK + save_id.encode()).ljust(63) + b"\n"


class DataFile:
    """One data file of a checkpoint, for positional reads by any number of threads.

    Args:
        store: the folder of the checkpoint.
        name: the file.
        header: what it must begin with; None for foreign files.
        follow: whether it may be a symbolic link, as the files in Hugging Face's cache are.
    """

    def __init__(self, store: Store, name: str, header: bytes | None, *, follow: bool) -> None:
        self.path: Location = store.path(name)
        self.near_bytes, self.read_bytes = store.near_bytes, store.read_bytes
        self._store, self._name, self._header, self._follow = store, name, header, follow
        self.count = 0  # bytes read so far
        self._lock = Lock()

    def read_into(self, start: int, view: memoryview) -> None:
        """Fill `view` with the bytes from `start` on.

        Raises:
            CheckpointCorruptError: the file is missing, belongs to another save, or ends before.
            OSError: it cannot be read.
        """
        self.check_header()
        self.count += len(view)
        self._read(start, view)

    def read(self, start: int, nbytes: int) -> bytes:
        """The bytes `[start, start + nbytes)`; raises like `read_into`, before memory for them is allocated."""
        self.check_header()
        if nbytes > self.read_bytes and start + nbytes > self._store.sizes(names=[self._name]).get(self._name, 0):
            raise CheckpointCorruptError(f"data file {self.path} is truncated: it ends before byte {start + nbytes}")
        buffer = bytearray(nbytes)
        self.read_into(start, memoryview(buffer))
        return bytes(buffer)

    def check_header(self) -> None:
        """Raise like `read_into` if the file is missing or belongs to another save."""
        with self._lock:
            if self._header is None:
                return
            found = bytearray(len(self._header))
            self._read(0, memoryview(found))
            if found != self._header:
                raise CheckpointCorruptError(f"data file {self.path} belongs to a different save than the manifest")
            self._header = None  # it was compared

    def _read(self, start: int, view: memoryview) -> None:
        try:
            self._store.read_into(self._name, start, view, follow=self._follow)
        except FileNotFoundError:
            raise CheckpointCorruptError(
                f"data file {self.path} is missing; save checkpoints to storage that all ranks can read"
            ) from None
        except EOFError as error:
            raise CheckpointCorruptError(f"data file {self.path} is truncated: {error}") from None


class DataFiles:
    """The data files of a checkpoint, by name. Each is opened on its first read, and closed with the last reference.

    Args:
        index: the checkpoint.
    """

    def __init__(self, index: CheckpointIndex) -> None:
        self._store = store_at(index.path)
        self._follow = index.kind is Kind.SAFETENSORS
        self._header = None if index.save_id is None else file_header(index.save_id)
        self._files: dict[str, DataFile] = {}
        self._lock = Lock()

    def __getitem__(self, name: str) -> DataFile:
        with self._lock:
            if name not in self._files:
                self._files[name] = DataFile(self._store, name, self._header, follow=self._follow)
            return self._files[name]

    @property
    def bytes_read(self) -> int:
        """Bytes read from all files so far."""
        return sum(file.count for file in self._files.values())
