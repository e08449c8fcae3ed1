"""A directory that is written under a temporary name and gets its final name by one rename."""

from __future__ import annotations

import errno
import os
import uuid
from pathlib import Path

from opt_checkpoint.disk.files import DELETING, Files, discard, make_parents
from opt_checkpoint.disk.lease import LEASE, Lease, remove_leftovers
from opt_checkpoint.errors import CheckpointExistsError


class NewDirectory:
    """The target of one save, on the rank that coordinates it.

    Args:
        path: the directory, which must not exist.
        save_id: 32 hexadecimal digits that name this save.
        files: the file system.
        replace: whether a directory may be at `path`, which the commit replaces.
    """

    def __init__(self, path: Path, save_id: str, files: Files, *, replace: bool = False) -> None:
        self.path, self._save_id, self._files, self._replace = path, save_id, files, replace
        self._lease: Lease | None = None

    @property
    def temporary(self) -> Path:
        """The directory written to until the commit."""
        return self.path.with_name(f".opt-checkpoint-tmp-{self._save_id}")

    def make(self) -> None:
        """Create the temporary directory, and remove those of dead saves.

        Raises:
            CheckpointExistsError: the target already exists.
            OSError: the directory cannot be made.
        """
        if not self._replace and os.path.lexists(self.path):
            raise self._exists()
        make_parents(self._files, self.path)
        self._files.make_dir(self.temporary)
        self._lease = Lease.in_directory(self._files, self.temporary, self.path.name)
        remove_leftovers(self._files, self.path.parent, self._lease.renewed)

    def commit(self) -> None:
        """Sync the directory, rename it, and sync its parent.

        If only the last step fails, the directory stays: it is complete, and a reader may have opened it.

        Raises:
            OSError: raised by the file system.
        """
        self.release()
        self._files.remove(self.temporary / LEASE)
        self._files.sync_dir(self.temporary)
        old = self._move_aside() if self._replace and self.path.is_dir() else None
        try:
            self._files.rename(self.temporary, self.path)
        except OSError as error:
            if old is not None:
                self._files.rename(old, self.path)
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):  # another save has committed in the meantime
                raise self._exists() from error
            raise
        try:
            self._files.sync_dir(self.path.parent)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{error.strerror} (when syncing {self.path.parent}: {self.path.name} is complete, but a power "
                f"failure may still remove its name)",
            ) from error
        if old is not None:
            self._files.remove_tree(old)

    def _move_aside(self) -> Path:
        """Rename the existing directory, which is abandoned or damaged. A crash before the next rename loses it."""
        old = self.path.with_name(f"{DELETING}{uuid.uuid4().hex}")
        self._files.rename(self.path, old)
        return old

    def _exists(self) -> CheckpointExistsError:
        return CheckpointExistsError(
            f"{self.path} exists, and a checkpoint is never overwritten. Choose another path, or remove it first"
        )

    def release(self) -> None:
        """Release the lease on the temporary directory. Called by `commit` and `abandon`."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()

    def abandon(self) -> None:
        """Remove the temporary directory of a failed save, after all ranks have finished."""
        self.release()
        if self.temporary.is_dir():
            discard(self._files, self.temporary, self._save_id)
