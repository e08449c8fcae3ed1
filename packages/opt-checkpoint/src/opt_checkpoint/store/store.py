"""The one protocol of storage, with a directory or a bucket behind it; the code above never asks which.

A store is a place below which checkpoints and small files are. Names are relative to it, with slashes. A *target* is
the name of a checkpoint; a *folder* holds the files of one save, and is not visible as a checkpoint until the commit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from opt_checkpoint.errors import CheckpointCorruptError, CheckpointExistsError
from opt_checkpoint.store.paths import Location

T = TypeVar("T")
MANIFEST = "manifest.bin"  # a checkpoint is recognised by it; `Store.commit` says what commits it
Content: TypeAlias = Callable[[], Iterable[bytes | memoryview]]
"""The bytes of a file, the same in each call. The memory of a piece may not change until the file is written."""


class Leftover(NamedTuple):
    """The folder of a save that was not committed.

    Args:
        folder: its name.
        writer: who may still write to it; None if certainly no process does.
    """

    folder: str
    writer: str | None


class Store(Protocol):
    """Checkpoints and small files below one place.

    Errors are `OSError`s, of which only `FileNotFoundError` means that something is absent, and
    `CheckpointCorruptError`s. The methods from `begin` to `abandon` are called on rank 0 of a save, `write` on
    all ranks.
    """

    near_bytes: int  # reading up to this many unneeded bytes costs less than another read
    read_bytes: int  # of one large read

    def path(self, name: str = "") -> Location:
        """Return the full path of a name, for people."""

    def folder(self, target: str, save_id: str) -> str:
        """Return the folder that all ranks of a save write to, named by 32 hexadecimal digits. No call is made."""

    def check_free(self, target: str) -> None:
        """Raise CheckpointExistsError if something is at a target."""

    def begin(self, target: str, folder: str, *, replace: bool = False) -> None:
        """Take a lease on the new folder of a save, and remove folders of dead saves.

        Args:
            target: the checkpoint.
            folder: of this save.
            replace: whether the commit may replace a checkpoint that is at `target`.

        Raises:
            CheckpointExistsError: something is at `target`.
        """

    def write(self, name: str, content: Content) -> None:
        """Write a new file, safely stored on return."""

    def write_small(self, folder: str, contents: Mapping[str, bytes]) -> None:
        """Write new small files, by name."""

    def check_files(self, folder: str, sizes: Mapping[str, int]) -> None:
        """Raise CheckpointCorruptError if a file of a save is gone or has another size, where that can go unnoticed.

        Another save removes the files of this one if its lease has expired. In a directory, the commit then fails.

        Args:
            folder: of this save.
            sizes: of all files, by name.
        """

    def commit(self, target: str, folder: str, *, replace: bool = False) -> None:
        """Make a checkpoint visible at once, after all its files are written, and end the lease.

        This commits it: in a directory by one rename of the folder, in a bucket by one object that names the folder.

        Args:
            target: the checkpoint.
            folder: of this save.
            replace: as for `begin`.

        Raises:
            CheckpointExistsError: another save has committed in the meantime.
        """

    def abandon(self, folder: str) -> None:
        """Remove the folder of a failed save, unless it may have been committed."""

    def committed(self, target: str = "") -> str | None:
        """Return the folder of the committed checkpoint at a target; None if certainly none was committed."""

    def read(self, name: str) -> bytes:
        """Read a whole small file."""

    def read_into(self, name: str, start: int, view: memoryview) -> None:
        """Fill memory with the bytes of a file from `start` on. Raises EOFError if the file ends before."""

    def sizes(self, names: Iterable[str] | None = None) -> dict[str, int]:
        """Sizes of the files in the root: of all, or of those of `names` that exist. -1 for anything but a file."""

    def children(self, folder: str = "") -> list[str]:
        """Return the names of subfolders, sorted; a missing folder has none."""

    def put(self, name: str, content: bytes) -> None:
        """Write or replace a small file at once."""

    def remove(self, name: str) -> None:
        """Delete a small file, if it exists."""

    def retire(self, target: str) -> None:
        """Delete a checkpoint so that no reader finds a part of it."""

    def leftovers(self, targets: Iterable[str] | None = None) -> list[Leftover]:
        """Folders of saves that were not committed: of all saves below, or of those to these targets."""

    def discard(self, folder: str) -> None:
        """Delete a leftover."""


def already_there(path: Location) -> CheckpointExistsError:
    """Return the error for a target that exists."""
    return CheckpointExistsError(
        f"{path} exists, and a checkpoint is never overwritten. Choose another path, or remove it first"
    )


def named_in(store: Store, file: str, field: str, pattern: str) -> str | None:
    """Return the string in `field` of a small JSON file, or None if the file does not exist.

    Raises:
        CheckpointCorruptError: the file holds no string there that matches `pattern`.
    """
    try:
        name = json.loads(store.read(file))[field]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        name = None
    if not isinstance(name, str) or not re.fullmatch(pattern, name):
        raise CheckpointCorruptError(f"{store.path(file)} is damaged: it does not name a {field}")
    return name


current: Callable[..., Any] | None = None  # set by tests, to make any call fail: is called in place of `act`


def call(name: str, key: str, act: Callable[[], T], detail: str = "") -> T:
    """Make one system call or request.

    Args:
        name: what it does, such as `fsync` or `upload`.
        key: the path or key that it concerns.
        act: makes the call.
        detail: the new path of a rename, or the ranges of a read.
    """
    return act() if current is None else current(name, key, act, detail)
