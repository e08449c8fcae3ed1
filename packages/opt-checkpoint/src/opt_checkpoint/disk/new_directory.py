"""A directory that is written under a temporary name and gets its final name by one rename."""

from __future__ import annotations

import os
from pathlib import Path

from opt_checkpoint.disk.files import Files, discard, make_parents
from opt_checkpoint.disk.lease import LEASE, Lease, remove_leftovers
from opt_checkpoint.errors import CheckpointExistsError


class NewDirectory:
    """The target of one save, on the rank that coordinates it.

    Args:
        path: the directory, which must not exist.
        save_id: 32 hexadecimal digits that name this save.
        files: the file system.
    """

    def __init__(self, path: Path, save_id: str, files: Files) -> None:
        self.path, self._save_id, self._files = path, save_id, files
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
        if os.path.lexists(self.path):
            raise CheckpointExistsError(
                f"{self.path} exists, and a checkpoint is never overwritten. Choose another path, or remove it first"
            )
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
        self._files.rename(self.temporary, self.path)
        try:
            self._files.sync_dir(self.path.parent)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{error.strerror} (when syncing {self.path.parent}: {self.path.name} is complete, but a power "
                f"failure may still remove its name)",
            ) from error

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
