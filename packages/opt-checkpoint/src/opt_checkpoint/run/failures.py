"""Sends errors to other ranks as text, because an exception may not pickle here, or not unpickle there."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeVar, cast

from opt_checkpoint.errors import CheckpointFailedError, CheckpointingException

T = TypeVar("T")
_NOTES = 4  # number of ranks whose traceback is shown; others rarely add information


class Failure(NamedTuple):
    """An exception of some rank.

    Args:
        type_name: its class.
        text: its message.
        trace: its traceback, as printed.
        errno: that of an `OSError`.
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
        return cls(type(error).__name__, _text_of(error), trace, getattr(error, "errno", None))

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


def as_ours(what: str, failures: Mapping[int, Failure]) -> CheckpointingException:
    """One error for the failures of several ranks; of their type if all have the same type of this package.

    The tracebacks of the ranks are notes of the error, which Python prints below its message.
    """
    lines = [f"rank {rank}: {f.type_name}: {f.text}" for rank, f in sorted(failures.items())]
    text = f"{what} failed on {len(failures)} rank(s)\n" + "\n".join(lines)
    kinds = {failure.kind for failure in failures.values()}
    kind = next(iter(kinds))
    error: CheckpointingException
    if len(kinds) == 1 and kind is not None and kind is not CheckpointFailedError:
        error = kind(text)
    else:
        error = CheckpointFailedError(text, {rank: f.as_exception() for rank, f in failures.items()})
    for rank, failure in sorted(failures.items())[:_NOTES]:
        error.add_note(f"On rank {rank}:\n{failure.trace}")
    return error


class Crossing:
    """Wraps a planner or storage so that torch.distributed.checkpoint can send its exceptions to other ranks.

    Args:
        target: the planner or storage, to which all calls and attributes are forwarded.
    """

    def __init__(self, target: object) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if not callable(value):
            return value

        @functools.wraps(value)
        def call(*args: Any, **options: Any) -> Any:
            try:
                return value(*args, **options)
            except Exception as error:
                raise FailureOnRank(Failure.of(error)) from error

        setattr(self, name, call)  # found without this function next time
        return call


def crossing(target: T) -> T:
    """`Crossing(target)`, typed as `target`."""
    return cast(T, Crossing(target))
