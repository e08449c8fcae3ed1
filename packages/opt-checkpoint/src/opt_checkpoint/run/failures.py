"""Errors as they travel between ranks: as text, because an exception may not pickle here, or not unpickle there."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import NamedTuple

from opt_checkpoint.errors import CheckpointFailedError, CheckpointingException, CheckpointStorageError

_NOTES = 4  # number of ranks whose traceback is shown; others rarely add information


class Failure(NamedTuple):
    """An exception of some rank.

    Args:
        type_name: its class.
        text: its message.
        trace: its traceback, as printed.
        kind: its class again, if it is one of this package.
        errno: that of an `OSError`, or of a `CheckpointStorageError`.
    """

    type_name: str
    text: str
    trace: str
    kind: type[CheckpointingException] | None
    errno: int | None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """An exception as text."""
        try:
            text = str(error)
        except Exception:
            text = "(its message cannot be printed)"
        kind = type(error) if isinstance(error, CheckpointingException) else None
        return cls(
            type_name=type(error).__name__,
            text=text,
            trace="".join(traceback.format_exception(error)),
            kind=kind if kind is not None and kind.__module__.startswith("opt_checkpoint.") else None,
            errno=error.errno if isinstance(error, OSError) else None,
        )


class FailureOnRank(Exception):
    """A copy of an exception of another rank, which can always be pickled."""


def error_of_all(what: str, failures: Mapping[int, Failure], *, alone: bool) -> CheckpointingException:
    """One error for the failures of several ranks; of their type if all have the same type of this package.

    The tracebacks of the ranks are notes of the error, which Python prints below its message.

    Args:
        what: the operation that failed.
        failures: by rank.
        alone: whether there is only one rank, which the message then leaves out.
    """
    ranked = sorted(failures.items())
    kinds = {failure.kind for failure in failures.values()}
    kind = kinds.pop() if len(kinds) == 1 else None
    if alone:
        text = f"{what} failed: {'' if kind else failures[0].type_name + ': '}{failures[0].text}"
    else:
        lines = "\n".join(f"rank {rank}: {failure.type_name}: {failure.text}" for rank, failure in ranked)
        text = f"{what} failed on {len(failures)} rank(s)\n{lines}"
    error: CheckpointingException
    if kind is not None and not issubclass(kind, CheckpointFailedError):
        error = kind(text)
    else:
        causes: dict[int, BaseException] = {}
        for rank, failure in ranked:
            copy = FailureOnRank(f"{failure.type_name}: {failure.text}")
            causes[rank] = copy if failure.errno is None else OSError(failure.errno, failure.text)
        by_storage = any(isinstance(cause, OSError) for cause in causes.values())
        error = (CheckpointStorageError if by_storage else CheckpointFailedError)(text, causes)
    for rank, failure in ranked[:_NOTES]:
        error.add_note(failure.trace if alone else f"On rank {rank}:\n{failure.trace}")
    return error
