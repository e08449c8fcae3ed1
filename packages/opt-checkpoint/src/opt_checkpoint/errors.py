"""The error classes of this package. Bad input is a ValueError; a failure of the environment is not."""

from __future__ import annotations

from collections.abc import Collection, Mapping


class CheckpointingException(Exception):
    """Base class of the errors of this package. The message says what is wrong, and what to do.

    The name is Megatron-Core's (`megatron.core.dist_checkpointing.core.CheckpointingException`).
    """


class CheckpointValueError(CheckpointingException, ValueError):
    """An argument, a state or a checkpoint is wrong."""


class CheckpointCorruptError(CheckpointValueError):
    """Bytes on disk differ from those saved. The message names the file and, if known, the tensor."""


class CheckpointKeyError(CheckpointValueError):
    """The requested and the stored keys differ, and `strict` does not allow that."""


class CheckpointMismatchError(CheckpointValueError):
    """A stored tensor and the requested tensor differ in shape, dtype, coverage or layout."""


class CheckpointExistsError(CheckpointValueError):
    """The target of a save exists, or another trainer saves to the series. Checkpoints are never overwritten."""


class CheckpointNotFoundError(CheckpointValueError):
    """The given path does not exist, or is not a checkpoint."""


class CheckpointFailedError(CheckpointingException):
    """A save or load failed on some rank, for a reason outside of its arguments. Raised on every rank.

    Args:
        message: what failed, rank by rank.
        causes: a copy of the exception of each failed rank, by its rank in the process group: an `OSError` with its
            `errno`, or an exception whose text names the class. The tracebacks are notes of this error.
    """

    def __init__(self, message: str, causes: Mapping[int, BaseException] | None = None) -> None:
        super().__init__(message)
        self.causes = dict(causes or {})


class CheckpointStorageError(CheckpointFailedError, OSError):
    """A save or load failed because a file system or store failed. `errno` is that of the first rank that has one."""

    @property
    def errno(self) -> int | None:  # type: ignore[override]  # of an attribute
        return next((e.errno for e in self.causes.values() if isinstance(e, OSError) and e.errno), None)


def check_choice(
    name: str, value: object, allowed: Collection[str], error: type[ValueError] = CheckpointValueError
) -> None:
    """Raise an error that lists the allowed values of an argument, unless it has one of them."""
    if value not in allowed:
        raise error(f"{name}={value!r}; allowed: {', '.join(allowed)}")
