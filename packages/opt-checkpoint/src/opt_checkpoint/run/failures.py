"""Sends errors to other ranks as text, because an exception may not pickle here, or not unpickle there."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from opt_checkpoint.errors import (
    CheckpointFailedError,
    CheckpointingException,
    CheckpointStorageError,
)

_NOTES = 4  # number of ranks whose traceback is shown; others rarely add information


class Failure(NamedTuple):
    """An exception of some rank.

    Args:
        type_name: its class.
        text: its message.
        trace: its traceback, as printed.
        errno: that of an `OSError`, or of a `CheckpointStorageError`.
    """

    type_name: str
    text: str
    trace: str
    errno: int | None = None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """An exception as text."""
        if isinstance(error, FailureOnRank):
            return error.failure
        trace = "".join(traceback.format_exception(error))
        errno = error.errno if isinstance(error, OSError) else None
        return cls(type(error).__name__, _text_of(error), trace, errno)

    @property
    def kind(self) -> type[CheckpointingException] | None:
        """The class of the exception if it is one of this package, else None."""
        return next((kind for kind in _own_errors(CheckpointingException) if kind.__name__ == self.type_name), None)

    def as_exception(self) -> BaseException:
        """A copy of the exception for other ranks."""
        if self.errno is not None:
            return OSError(self.errno, self.text)
        return FailureOnRank(self)


def _own_errors(base: type[CheckpointingException]) -> Iterator[type[CheckpointingException]]:
    """The error classes of this package."""
    if base.__module__.startswith("opt_checkpoint."):
        yield base
        for kind in base.__subclasses__():
            yield from _own_errors(kind)


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its message cannot be printed)"


class FailureOnRank(Exception):
    """A copy of an exception of another rank, which can always be pickled."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure

    def __str__(self) -> str:
        return f"{self.failure.type_name}: {self.failure.text}"


def as_ours(what: str, failures: Mapping[int, Failure], *, alone: bool) -> CheckpointingException:
    """One error for the failures of several ranks; of their type if all have the same type of this package.

    The tracebacks of the ranks are notes of the error, which Python prints below its message.

    Args:
        what: the operation that failed.
        failures: by rank.
        alone: whether this process is the only rank, which the message then leaves out.
    """
    ranked = sorted(failures.items())
    kinds = {failure.kind for failure in failures.values()}
    kind = next(iter(kinds)) if len(kinds) == 1 else None
    if alone:
        text = f"{what} failed: {'' if kind else failures[0].type_name + ': '}{failures[0].text}"
    else:
        lines = "\n".join(f"rank {rank}: {failure.type_name}: {failure.text}" for rank, failure in ranked)
        text = f"{what} failed on {len(failures)} rank(s)\n{lines}"
    error: CheckpointingException
    if kind is not None and not issubclass(kind, CheckpointFailedError):
        error = kind(text)
    else:
        causes = {rank: failure.as_exception() for rank, failure in ranked}
        by_storage = any(isinstance(cause, OSError) for cause in causes.values())
        error = (CheckpointStorageError if by_storage else CheckpointFailedError)(text, causes)
    for rank, failure in ranked[:_NOTES]:
        error.add_note(failure.trace if alone else f"On rank {rank}:\n{failure.trace}")
    return error
