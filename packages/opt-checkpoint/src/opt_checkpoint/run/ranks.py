"""The ranks that save or load together, and the exchanges in which they agree.

In an exchange, each rank computes something and sends its result or its failure. A rank that fails completes the
exchange before it raises, so that no rank waits for another. All ranks raise the same error; a rank that was
interrupted raises its own KeyboardInterrupt or SystemExit. No other module gets ranks from torch. Threads that share a
process group take turns.
"""

from __future__ import annotations

import hashlib
import pickle
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from threading import Condition, Lock
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from opt_checkpoint.errors import (
    CheckpointFailedError,
    CheckpointingException,
    CheckpointStorageError,
    CheckpointValueError,
)
from opt_checkpoint.store import AnyPath, Location, location_of

S = TypeVar("S")
T = TypeVar("T")
_FREEING_S = 0.01
_NOTES = 4  # number of ranks whose traceback is shown; others rarely add information


@dataclass(frozen=True)
class Ranks:
    """The ranks of a process group in a fixed order; by default this process alone. Rank 0 coordinates.

    Args:
        rank: this process's number.
        size: the number of ranks.
        group: their process group; None for a single process, and for torch's default group.
        turns: of the threads that use the group; None if one thread uses it.
        name: of this thread, the same on all ranks.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    turns: Turns | None = None
    name: str = ""

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the value of every rank, by rank."""
        values = [value] * self.size
        self.call(dist.all_gather_object, values, value)
        return values

    def gather(self, value: Any) -> list[Any] | None:
        """Return the value of every rank on rank 0, and None on the others."""
        values = [value] * self.size if self.rank == 0 else None
        self.call(dist.gather_object, value, values, group_dst=0)
        return values

    def scatter(self, values: list[Any] | None) -> Any:
        """Return the value that rank 0 passes for this rank; other ranks pass None."""
        received = [None if values is None else values[0]]
        self.call(dist.scatter_object_list, received, values, group_src=0)
        return received[0]

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0."""
        box = [value]
        self.call(dist.broadcast_object_list, box, group_src=0)
        return box[0]

    def call(self, collective: Callable[..., object], *arguments: Any, **options: Any) -> None:
        """Carry out a collective of torch, unless there is one rank.

        Ranks are numbered as in the group, not as in the world: torch forgets the world's numbers when the script calls
        `destroy_process_group()`, but a group works as long as it is referred to, for a save in the background.

        Raises:
            CheckpointFailedError: for the timeouts and lost connections of gloo and nccl.
        """
        try:
            if self.size > 1:
                with self.turns.turn(self.name) if self.turns is not None else nullcontext():
                    collective(*arguments, group=self.group, **options)
        except RuntimeError as error:
            raise CheckpointFailedError(f"a rank did not answer: {error}") from error


def ranks_of(process_group: dist.ProcessGroup | Ranks | None) -> Ranks:
    """Return the ranks of a group, of the default group for None; this process alone without torch.distributed."""
    if isinstance(process_group, Ranks):
        return process_group
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(process_group) == 1:
        return Ranks()
    return Ranks(dist.get_rank(process_group), dist.get_world_size(process_group), process_group)


def leave(group: dist.ProcessGroup) -> None:
    """Destroy a process group, once everything that this rank sent through it has arrived.

    On torch 2.6, gloo's threads need the GIL to free a finished message, but destroying a group waits for them while it
    holds the GIL. Sleeping first gives them the GIL.
    """
    time.sleep(_FREEING_S)
    with suppress(ValueError, KeyError):  # the script has destroyed it with all groups
        dist.destroy_process_group(group)


class Failure(NamedTuple):
    """An exception of some rank as text, because an exception may not pickle here, or not unpickle there.

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
        """Return an exception as text."""
        printed = traceback.TracebackException.from_exception(error)  # also if its `__str__` raises
        kind = type(error) if isinstance(error, CheckpointingException) else None
        is_ours = kind is not None and kind.__module__.startswith("opt_checkpoint.")
        return cls(
            type_name=type(error).__name__,
            text=str(printed),
            trace="".join(printed.format()),
            kind=kind if is_ours else None,
            errno=error.errno if isinstance(error, OSError) else None,
        )


class FailureOnRank(Exception):
    """A copy of an exception of another rank, which can always be pickled."""


def error_of_all(what: str, failures: Mapping[int, Failure], *, alone: bool) -> CheckpointingException:
    """Return one error for the failures of several ranks; of their type if all have the same type of this package.

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


class _Outcome(NamedTuple):
    """What a rank sends: a value (pickled, if there are other ranks), or failures by rank."""

    value: Any
    failures: dict[int, Failure]


@dataclass
class _Exchange:
    """One exchange on this rank.

    Args:
        ranks: all of them take part.
        what: named in errors.
    """

    ranks: Ranks
    what: str
    raised: BaseException | None = None  # by this rank

    def attempt(self, compute: Callable[[], Any], *, each: bool = False) -> _Outcome:
        """Return what this rank sends: the value of a call, or its failure; the values for each rank as a list."""
        try:
            value = compute()
            if self.ranks.size > 1:  # pickled here, so that a value that does not pickle is a failure
                value = list(map(pickle.dumps, value)) if each else pickle.dumps(value)
            return _Outcome(value, {})
        except BaseException as error:  # also Ctrl-C: the other ranks wait for an answer
            self.raised = error
            return _Outcome(None, {self.ranks.rank: Failure.of(error)})

    def values(self, outcomes: Sequence[_Outcome]) -> list[Any]:
        """Return the values that were received, or the failures of all ranks as one error. An interrupt is raised
        itself."""
        if self.raised is not None and not isinstance(self.raised, Exception):
            raise self.raised
        failures = {rank: failure for outcome in outcomes for rank, failure in outcome.failures.items()}
        if failures:
            raise error_of_all(self.what, failures, alone=self.ranks.size == 1) from self.raised
        return [outcome.value if self.ranks.size == 1 else pickle.loads(outcome.value) for outcome in outcomes]


def from_all(ranks: Ranks, compute: Callable[[], T], what: str) -> list[T]:
    """Compute a value on each rank, and return all values, by rank, on every rank. One exchange.

    Args:
        ranks: all of them call this together.
        compute: called on this rank; its value must pickle.
        what: named in the error.

    Raises:
        CheckpointingException: some rank raised an error.
    """
    exchange = _Exchange(ranks, what)
    return exchange.values(ranks.gather_objects(exchange.attempt(compute)))


def own_and_all(ranks: Ranks, compute: Callable[[], T], send: Callable[[T], S], what: str) -> tuple[T, list[S]]:
    """Compute a value on each rank; return this rank's own, and what `send` makes of that of every rank. One exchange.

    Raises:
        CheckpointingException: some rank raised an error.
    """
    own: list[T] = []

    def sent() -> S:
        own.append(compute())
        return send(own[0])

    per_rank = from_all(ranks, sent, what)
    return own[0], per_rank


def own_and_distinct(ranks: Ranks, compute: Callable[[], T], send: Callable[[T], S], what: str) -> tuple[T, list[S]]:
    """Do what `own_and_all` does, but of ranks with equal values only the first sends it. Two exchanges.

    So what is sent does not grow with the number of ranks that hold the same parameters.

    Raises:
        CheckpointingException: some rank raised an error.
    """
    digest_of = lambda value: hashlib.sha256(pickle.dumps(send(value))).digest()
    own, digests = own_and_all(ranks, compute, digest_of, what)
    firsts = [digests.index(digest) for digest in digests]
    per_rank: list[Any] = from_all(ranks, lambda: send(own) if firsts[ranks.rank] == ranks.rank else None, what)
    return own, [per_rank[first] for first in firsts]


def on_all(ranks: Ranks, compute: Callable[[], T], what: str) -> T:
    """Compute a value on each rank, and return this rank's own once all ranks have theirs. One exchange.

    Raises:
        CheckpointingException: some rank raised an error.
    """
    return own_and_all(ranks, compute, lambda _: None, what)[0]


def from_rank_0(ranks: Ranks, compute: Callable[[], T], what: str) -> T:
    """Compute a value on rank 0 only, and return it on every rank. One exchange. Arguments are as for `from_all`.

    Raises:
        CheckpointingException: rank 0 raised an error.
    """
    exchange = _Exchange(ranks, what)
    outcome = ranks.broadcast(exchange.attempt(compute) if ranks.rank == 0 else None)
    value: T = exchange.values([outcome])[0]
    return value


def through_rank_0(
    ranks: Ranks, compute: Callable[[], S], combine: Callable[[list[S]], Any], what: str, *, each: bool = False
) -> Any:
    """Compute a value on each rank, combine the values on rank 0, and return the result.

    Two collectives: a gather to rank 0, then a broadcast, or with `each` a scatter.

    Args:
        ranks: all of them call this together.
        compute: called on this rank; its value must pickle.
        combine: called on rank 0, with the values by rank, if all ranks have one.
        what: named in the error.
        each: whether `combine` returns a separate result for each rank.

    Raises:
        CheckpointingException: some rank raised an error.
    """
    exchange = _Exchange(ranks, what)
    outcomes = ranks.gather(exchange.attempt(compute))
    answers: list[_Outcome] | None = None
    if outcomes is not None:
        received = outcomes
        answer = _Outcome(None, {rank: failure for outcome in outcomes for rank, failure in outcome.failures.items()})
        if not answer.failures:
            answer = exchange.attempt(lambda: combine(exchange.values(received)), each=each)
        is_list = each and not answer.failures
        answers = [_Outcome(value, {}) for value in answer.value] if is_list else [answer] * ranks.size
    return exchange.values([ranks.scatter(answers) if each else ranks.broadcast(answers and answers[0])])[0]


def same_everywhere(ranks: Ranks, what: str, **arguments: object) -> None:
    """Raise on every rank if ranks were given different arguments; all call this together, before anything else.

    Raises:
        CheckpointingException: naming the first argument that differs, its values and their ranks.
    """
    check_equal(what, from_all(ranks, lambda: texts_of(arguments), what))


def same_location(ranks: Ranks, what: str, path: AnyPath, **arguments: object) -> Location:
    """Return the location of a path, after `same_everywhere` for the path and the arguments; all call this together.

    Raises:
        CheckpointingException: ranks differ, or some rank cannot open the store of a URL; on every rank.
    """

    def texts(location: Location) -> dict[str, str]:
        return texts_of({"path": location, **arguments})

    location, per_rank = own_and_all(ranks, lambda: location_of(path), texts, what)
    check_equal(what, per_rank)
    return location


def texts_of(arguments: Mapping[str, object]) -> dict[str, str]:
    """Arguments in the form in which ranks compare them."""
    return {name: str(value) for name, value in arguments.items()}


def check_equal(what: str, per_rank: Sequence[Mapping[str, str]]) -> None:
    """Raise if ranks were given different arguments. Otherwise those of rank 0 would be used silently.

    Args:
        what: named in the error.
        per_rank: the texts of the arguments, by rank; the same on all ranks.

    Raises:
        CheckpointingException: naming the first argument that differs, its values and their ranks.
    """
    for name in per_rank[0]:
        by_value: dict[str, list[int]] = {}
        for rank, given in enumerate(per_rank):
            by_value.setdefault(given[name], []).append(rank)
        if len(by_value) > 1:
            named = ", ".join(f"{value} (ranks {on})" for value, on in by_value.items())
            raise CheckpointValueError(f"{what}: ranks differ in {name}: {named}; pass the same value on all ranks")


class Turns:
    """The turns of the threads of this rank that use one process group, in the same order on every rank.

    Two threads that call collectives of one group in different orders on two ranks would exchange each other's
    messages. Before each collective, rank 0 therefore broadcasts whose turn it is. Messages from rank to rank need no
    turn.

    Args:
        choose: returns on every rank the name that rank 0 passes; a collective.
    """

    def __init__(self, choose: Callable[[str], str]) -> None:
        self._choose = choose
        self._choosing = Lock()
        self._changed = Condition()
        self._waiting: list[str] = []
        self._turn: str | None = None

    @contextmanager
    def turn(self, name: str) -> Iterator[None]:
        """Provide a block in which no other thread of this rank uses the group."""
        with self._changed:
            self._waiting.append(name)
        try:
            while self._turn != name:
                with self._choosing:  # not `_changed`: a thread that was woken waits for that, deaf to Ctrl-C
                    if self._turn is None:
                        self._turn = self._choose(self._waiting[0])
                with self._changed:
                    self._changed.wait_for(lambda: self._turn in (name, None))
            yield
        finally:
            with self._changed:
                self._waiting.remove(name)
                self._turn = None if self._turn == name else self._turn
                self._changed.notify_all()


def in_turn(ranks: Ranks, *names: str) -> list[Ranks]:
    """Ranks for several threads, each with a name, that use one group; unchanged if there is one rank."""
    turns = None if ranks.size == 1 else Turns(ranks.broadcast)
    return [replace(ranks, turns=turns, name=name) for name in names]
