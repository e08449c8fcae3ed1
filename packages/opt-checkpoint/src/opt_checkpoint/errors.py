"""The error classes of this package. All are ValueErrors."""

from __future__ import annotations


class CheckpointingException(ValueError):
    """A checkpoint or a sharded description is wrong. The message says what is wrong, and what to do.

    The name is Megatron-Core's (`megatron.core.dist_checkpointing.core.CheckpointingException`).
    """


class CheckpointCorruptError(CheckpointingException):
    """Bytes on disk differ from those saved. The message names the file and, if known, the tensor."""


class CheckpointKeyError(CheckpointingException):
    """The requested and the stored keys differ, and `strict` does not allow that."""


class CheckpointMismatchError(CheckpointingException):
    """A stored tensor and the requested tensor differ in shape, dtype, coverage or layout."""


class CheckpointExistsError(CheckpointingException):
    """The target of a save exists. Checkpoints are never overwritten."""


class CheckpointNotFoundError(CheckpointingException):
    """The given path does not exist, or is not a checkpoint."""


class CheckpointFailedError(CheckpointingException):
    """A save or load failed on some rank. Every rank raises it with the same message.

    Args:
        message: what failed, rank by rank.
        causes: a copy of the exception of each failed rank, by its rank in the process group: an `OSError` with its
            `errno`, or an exception whose text names the class. The tracebacks are notes of this error.
    """

    def __init__(self, message: str, causes: dict[int, BaseException] | None = None) -> None:
        super().__init__(message)
        self.causes = dict(causes or {})
