"""Notices: what a rank tells its peers if it will not join the collective that they wait for.

A rank that raises inside a step, or drops an iteration, would leave its peers waiting until the timeout of their group,
by default half an hour with gloo. So an error that leaves a step posts a notice, and a rank that has waited
`PATIENCE_SECONDS` for a collective posts in which one it waits, and reads what the others have posted. It raises
`CollectiveError` if one of them will not come. Ranks that do not wait for long post and read nothing.

This needs tensors in host memory, as with gloo. With NCCL the host does not wait for its collectives.
"""

import pickle
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

PATIENCE_SECONDS = 4.0  # of waiting before a rank reads notices
POLL_SECONDS = 1.0  # between two looks
ADVISE_SECONDS = 8.0  # of waiting before a rank warns, which goes on waiting: the others may be late
MAX_RANKS = 128  # of groups whose ranks post where they wait: each reads the posts of all
COUNT = "opt_distributed/posts"  # a key of the store: the number of posts
RESTART = "collectives of this group are out of order from now on: start all ranks again, from a checkpoint"


class CollectiveError(RuntimeError):
    """A collective did not complete, because a peer died, raised an error, or never called it."""


_places: ContextVar[tuple[str, ...]] = ContextVar("places", default=())


@contextmanager
def at(place: str) -> Iterator[None]:
    """Say in notices that collectives inside are called at `place`, such as "step 3"."""
    token = _places.set((*_places.get(), place))
    try:
        yield
    finally:
        _places.reset(token)


_advice: ContextVar[str] = ContextVar("advice", default="")


@contextmanager
def advising(advice: str, *, place: str) -> Iterator[None]:
    """Give `advice` to ranks that wait for others at `place`: in a warning after `ADVISE_SECONDS`, and in the error of
    a collective that fails, as when a process has ended, or after the timeout of the group."""
    token = _advice.set(advice)
    try:
        with at(place):
            yield
    except CollectiveError:
        raise
    except RuntimeError as error:  # of the backend
        raise CollectiveError(f"{place}: {error}; {advice}") from error
    finally:
        _advice.reset(token)


def here() -> str:
    """The places of `at`, in words; empty outside of it."""
    return ", ".join(dict.fromkeys(_places.get()))


class Left(NamedTuple):
    """Why a rank will not join the collectives at a place; at any place if that is empty."""

    why: str = ""
    place: str = ""

    def concerns_this_place(self) -> bool:
        """Whether a collective that this rank waits for now is one that the other will not join."""
        return bool(self.why) and (not self.place or self.place in _places.get())


STAYS = Left()


class Tells(ABC):
    """A `Comm` that passes notices on."""

    @abstractmethod
    def tell(self, why: str, *, place: str = "") -> None:
        """Tell ranks that wait for this one in a collective, at any place or at one (`at`), why it will not come.

        An empty `why` withdraws that. Not a collective.
        """


class Wait(NamedTuple):
    """The collective that a rank waits for."""

    group: str
    number: int  # among the collectives of the group, counted from 1
    kind: str  # with its size, if that is equal on all ranks
    place: str = ""

    def is_met_by(self, other: "Wait") -> bool:
        """Whether another rank waits for the same collective, in the same way."""
        return self._replace(place="") == other._replace(place="")


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """The last post of a rank."""

    left: Left = STAYS
    waits: Wait | None = None
    launched: Mapping[str, int] = field(default_factory=dict)  # collectives by group


class Board:
    """The posts of all ranks of `torch.distributed`, in its store; and the collectives that this rank has launched."""

    def __init__(self, store: Any, rank: int):
        """`store` is a `torch.distributed.Store`, or None without one: then nothing is posted."""
        self._rank = rank
        self._own = Post()
        self._others: dict[int, Post] = {}
        self._num_read = 0
        try:
            if store is not None:
                self._num_read = store.add(COUNT, 0)
        except RuntimeError:  # the store of torch's backend "fake" holds nothing
            store = None
        self._store = store
        self.launched: dict[str, int] = {}  # by group to which this rank belongs
        self.given_up: dict[str, str] = {}  # groups with a collective for which this rank has stopped waiting, and why

    def launch(self, group: str, kind: str) -> Wait:
        """Count a collective. Raises CollectiveError if its group is out of order."""
        if group in self.given_up:
            raise CollectiveError(f"{self.given_up[group]}; {RESTART}")
        self.launched[group] += 1
        return Wait(group, self.launched[group], kind)

    def tell(self, left: Left) -> None:
        """Post why this rank left a place; an empty `left` withdraws the last such post."""
        if left != self._own.left and not self.given_up:
            self._post(replace(self._own, left=left))

    def wait(self, work: Any, launch: Wait, members: Sequence[int]) -> object:
        """Wait for a collective among `members`, ranks of the world.

        Raises CollectiveError if one of them will not join it; the errors of the backend otherwise.
        """
        patience = PATIENCE_SECONDS
        waited = 0.0
        wait = launch._replace(place=here() or launch.kind)
        advice = _advice.get()
        while True:
            try:
                return work.wait(timedelta(seconds=patience))
            except RuntimeError:
                if work.is_completed():
                    return work.wait()  # raises its own error, if it has one
            waited += patience
            patience = POLL_SECONDS
            with suppress(dist.DistError):  # the process with the store has ended, and so the collective will fail
                self._check(wait, members)
            if advice and waited >= ADVISE_SECONDS:
                self._warn_of_absent(wait, members, advice)
                advice = ""  # once

    def _check(self, wait: Wait, members: Sequence[int]) -> None:
        if len(members) <= MAX_RANKS and (self._own.waits is None or not wait.is_met_by(self._own.waits)):
            self._post(replace(self._own, waits=wait, launched=dict(self.launched)))
        self._read()
        for rank in members:
            why = self._why_absent(rank, wait)
            if why:
                self.given_up[wait.group] = f"{wait.place}: {why}"
                self._post(replace(self._own, left=Left(f"stopped waiting in {wait.place}, because {why}")))
                raise CollectiveError(f"{why}; {RESTART}")

    def _warn_of_absent(self, wait: Wait, members: Sequence[int], advice: str) -> None:
        """Name the ranks that do not wait for the same collective, as far as this rank has read."""
        absent = []
        for rank in members:
            other = self._others.get(rank, Post()).waits
            if rank != self._rank and (other is None or not wait.is_met_by(other)):
                absent.append(rank)
        which = f"ranks {absent}" if len(members) <= MAX_RANKS else "other ranks"
        warnings.warn(
            f"{wait.place}: rank {self._rank} has waited for {ADVISE_SECONDS:g} s for {which}; {advice}",
            RuntimeWarning,
            stacklevel=1,
        )

    def _why_absent(self, rank: int, wait: Wait) -> str:
        """Why another rank will not join the collective that this one waits for; empty if it may."""
        post = self._others.get(rank, Post())
        if post.left.concerns_this_place():
            return f"rank {rank} {post.left.why}"
        other = post.waits
        if other is None or other.group not in self.launched or wait.is_met_by(other):
            return ""
        # Neither launches what the other waits for: this rank waits, and so does the other, as long as this one does.
        is_same = (other.group, other.number) == (wait.group, wait.number)
        is_stuck = self.launched[other.group] < other.number and post.launched.get(wait.group, 0) < wait.number
        return f"rank {rank} waits in {other.place}" if is_same or is_stuck else ""

    def _post(self, post: Post) -> None:
        self._own = post
        if self._store is not None:
            number = self._store.add(COUNT, 1)
            self._store.set(f"{COUNT}/{number}", pickle.dumps((self._rank, post)))

    def _read(self) -> None:
        if self._store is None:
            return
        for number in range(self._num_read + 1, self._store.add(COUNT, 0) + 1):
            rank, post = pickle.loads(self._store.get(f"{COUNT}/{number}"))
            self._others[rank] = post
            self._num_read = number


_boards: WeakKeyDictionary[dist.ProcessGroup, Board] = WeakKeyDictionary()  # by world; process groups are global, too


def board_of_world() -> Board:
    """The board of the present world of `torch.distributed`."""
    world = dist.group.WORLD
    assert world is not None
    if world not in _boards:
        _boards[world] = Board(_get_default_store(), dist.get_rank())  # torch 2.6 gives that of a group to nobody
    return _boards[world]
