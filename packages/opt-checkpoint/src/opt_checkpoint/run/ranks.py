"""The ranks that save or load together: one process or a process group. No other module gets ranks from torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch.distributed as dist

from opt_checkpoint.errors import CheckpointFailedError, CheckpointingException, CheckpointValueError
from opt_checkpoint.run.failures import Failure, as_ours
from opt_checkpoint.store import AnyPath, Location, location_of

S = TypeVar("S")
T = TypeVar("T")
_FREEING_S = 0.01


class Ranks(Protocol):
    """Ranks in a fixed order, including this process. Rank 0 coordinates."""

    @property
    def rank(self) -> int:
        """This process's number."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Their process group; None for a single process, and for torch's default group."""

    @property
    def alone(self) -> bool:
        """Whether torch.distributed is not initialized, so that no messages can be sent."""

    def gather_everywhere(self, value: T) -> list[T]:
        """Gather a value from every rank; returns the values by rank, on every rank."""

    def gather_to_first(self, value: T) -> list[T] | None:
        """Gather a value from every rank on rank 0; returns the values by rank there, and None elsewhere."""

    def scatter_from_first(self, values: Sequence[T] | None) -> T:
        """Return the value that rank 0 passes for this rank; other ranks pass None."""


class OneProcess(NamedTuple):
    """A world of one rank, without torch.distributed."""

    rank: int = 0
    size: int = 1
    group: None = None
    alone: bool = True

    def gather_everywhere(self, value: T) -> list[T]:
        return [value]

    def gather_to_first(self, value: T) -> list[T] | None:
        return [value]

    def scatter_from_first(self, values: Sequence[T] | None) -> T:
        assert values is not None
        return values[0]


class GroupRanks(NamedTuple):
    """The ranks of a process group."""

    rank: int
    size: int
    group: dist.ProcessGroup | None
    alone: bool = False

    def gather_everywhere(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size
        with _answered():
            dist.all_gather_object(values, value, group=self.group)
        return values

    def gather_to_first(self, value: T) -> list[T] | None:
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with _answered():
            dist.gather_object(value, values, dst=_first_of(self.group), group=self.group)
        return values

    def scatter_from_first(self, values: Sequence[T] | None) -> T:
        received: list[Any] = [None]
        with _answered():
            given = None if values is None else list(values)
            dist.scatter_object_list(received, given, src=_first_of(self.group), group=self.group)
        value: T = received[0]
        return value


@contextmanager
def _answered() -> Iterator[None]:
    """Raise CheckpointFailedError for the timeouts and lost connections of gloo and nccl."""
    try:
        yield
    except RuntimeError as error:
        raise CheckpointFailedError(f"a rank did not answer: {error}") from error


def _first_of(group: dist.ProcessGroup | None) -> int:
    """Rank 0 of a group as a rank of the world."""
    return 0 if group is None else dist.get_global_rank(group, 0)


def ranks_of(process_group: dist.ProcessGroup | None) -> Ranks:
    """The ranks of a group, of the default group for None; this process alone without torch.distributed."""
    if not (dist.is_available() and dist.is_initialized()):
        return OneProcess()
    return GroupRanks(dist.get_rank(process_group), dist.get_world_size(process_group), process_group)


def leave(group: dist.ProcessGroup) -> None:
    """Destroy a process group, once everything that this rank sent through it has arrived.

    On torch 2.6, gloo's threads need the GIL to free a finished message, but destroying a group waits for them while it
    holds the GIL. Sleeping first gives them the GIL.
    """
    time.sleep(_FREEING_S)
    dist.destroy_process_group(group)


class _Outcome(NamedTuple):
    value: Any
    failure: Failure | None


def agreed(ranks: Ranks, compute: Callable[[], T], what: str) -> T:
    """Compute a value on rank 0 and return it on every rank, or raise its error on every rank.

    Args:
        ranks: all of them call this together.
        compute: called on rank 0 only; its value must pickle.
        what: named in the error.

    Raises:
        CheckpointingException: raised by rank 0.
        CheckpointFailedError: rank 0 raised another exception.
    """
    outcome, own = _Outcome(None, None), None
    if ranks.rank == 0:
        outcome, own = _outcome(compute)
    if not ranks.alone:
        outcome = _from_first(ranks, outcome)
    _raise_failures(ranks, {} if outcome.failure is None else {0: outcome.failure}, own, what)
    value: T = outcome.value
    return value


def _outcome(compute: Callable[[], object]) -> tuple[_Outcome, BaseException | None]:
    """The value of a call, or its exception and a copy of it for other ranks."""
    try:
        return _Outcome(compute(), None), None
    except BaseException as error:  # also Ctrl-C: the other ranks wait for an answer
        return _Outcome(None, Failure.of(error)), error


def _raise_failures(ranks: Ranks, failures: dict[int, Failure], own: BaseException | None, what: str) -> None:
    """Raise the failures of all ranks as one error; a KeyboardInterrupt or SystemExit of this rank as itself."""
    if own is not None and not isinstance(own, Exception):
        raise own
    if failures:
        raise as_ours(what, failures, alone=ranks.alone) from own


def _from_first(ranks: Ranks, outcome: _Outcome) -> _Outcome:
    box: list[Any] = [outcome]
    dist.broadcast_object_list(box, src=_first_of(ranks.group), group=ranks.group)
    received: _Outcome = box[0]
    return received


def everyone(ranks: Ranks, error: BaseException | None, what: str) -> None:
    """Raise the errors of all ranks on all ranks; return if there are none. All ranks call this together.

    Raises:
        CheckpointingException: some rank has an error.
    """
    own = None if error is None else Failure.of(error)
    failures = {rank: failure for rank, failure in enumerate(ranks.gather_everywhere(own)) if failure is not None}
    _raise_failures(ranks, failures, error, what)


def from_everyone(ranks: Ranks, compute: Callable[[], T], what: str) -> list[T]:
    """Compute a value on each rank and return all values, by rank, on every rank; or raise the errors of all ranks.

    Args:
        ranks: all of them call this together.
        compute: called on this rank; its value must pickle.
        what: named in the error.

    Raises:
        CheckpointingException: some rank raised an error.
    """
    outcome, own = _outcome(compute)
    outcomes = ranks.gather_everywhere(outcome)
    _raise_failures(ranks, {rank: o.failure for rank, o in enumerate(outcomes) if o.failure is not None}, own, what)
    return [o.value for o in outcomes]


def through_first(ranks: Ranks, compute: Callable[[], S], combine: Callable[[list[S]], Sequence[T]], what: str) -> T:
    """Compute a value on each rank, combine the values on rank 0, and return each rank its result; or raise all errors.

    Args:
        ranks: all of them call this together.
        compute: called on this rank; its value must pickle.
        combine: called on rank 0, with the values by rank, if all ranks have one; returns a result for each rank.
        what: named in the error.

    Raises:
        CheckpointingException: some rank raised an error.
    """
    outcome, own = _outcome(compute)
    outcomes = ranks.gather_to_first(outcome)
    answers: list[tuple[Any, dict[int, Failure]]] | None = None
    if outcomes is not None:
        failures = {rank: o.failure for rank, o in enumerate(outcomes) if o.failure is not None}
        results: Sequence[Any] = [None] * ranks.size
        if not failures:
            combined, own = _outcome(lambda: combine([o.value for o in outcomes]))
            if combined.failure is None:
                results = combined.value
            else:
                failures = {0: combined.failure}
        answers = [(result, failures) for result in results]
    result, failures = ranks.scatter_from_first(answers)
    _raise_failures(ranks, failures, own, what)
    value: T = result
    return value


def same_location(ranks: Ranks, what: str, path: AnyPath, **arguments: object) -> Location:
    """Return the location of a path, after `same_everywhere` for the path and the arguments; all call this together.

    Raises:
        CheckpointingException: ranks differ, or some rank cannot open the store of a URL; on every rank.
    """
    place: Location | None = None
    error: CheckpointingException | None = None
    try:
        place = location_of(path)
    except CheckpointingException as raised:
        error = raised
    same_everywhere(ranks, what, path=place or str(path).rstrip("/"), **arguments)
    if not isinstance(place, Path):  # a path in a file system cannot raise on any rank
        everyone(ranks, error, what)
    if place is None:
        raise RuntimeError("a rank without a place has an error")
    return place


def same_everywhere(ranks: Ranks, what: str, **arguments: object) -> None:
    """Raise on every rank if ranks were given different arguments; all call this together, before anything else.

    Otherwise the arguments of rank 0 would be used silently, or ranks would wait for one another.

    Raises:
        CheckpointingException: naming the first argument that differs, its values and their ranks.
    """
    own = {name: str(value.value if isinstance(value, Enum) else value) for name, value in arguments.items()}
    per_rank = ranks.gather_everywhere(own)
    for name in own:
        by_value: dict[str, list[int]] = {}
        for rank, of_rank in enumerate(per_rank):
            by_value.setdefault(of_rank[name], []).append(rank)
        if len(by_value) > 1:
            named = ", ".join(f"{value} (ranks {on})" for value, on in by_value.items())
            raise CheckpointValueError(f"{what}: ranks differ in {name}: {named}; pass the same value on all ranks")
