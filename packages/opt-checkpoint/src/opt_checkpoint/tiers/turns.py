"""One process group for the background saves of both tiers, whose threads take turns in the same order on every rank.

Two threads that call collectives of one group in different orders on two ranks would exchange each other's messages.
Before each collective, rank 0 therefore broadcasts whose turn it is. Messages from rank to rank need no turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Condition
from typing import Any

from opt_checkpoint.run.ranks import Ranks


class Turns:
    """The turns of the threads of this rank.

    Args:
        choose: returns on every rank the name that rank 0 passes; a collective.
    """

    def __init__(self, choose: Callable[[str], str]) -> None:
        self._choose, self._changed = choose, Condition()
        self._waiting: list[str] = []
        self._is_choosing = False
        self._turn: str | None = None

    @contextmanager
    def turn(self, name: str) -> Iterator[None]:
        """A block in which no other thread of this rank uses the group, in the same order on every rank."""
        with self._changed:
            self._waiting.append(name)
        try:
            self._wait(name)
            yield
        finally:
            with self._changed:
                self._waiting.remove(name)
                self._turn = None if self._turn == name else self._turn
                self._changed.notify_all()

    def _wait(self, name: str) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._turn == name or (self._turn is None and not self._is_choosing))
                if self._turn == name:
                    return
                self._is_choosing, proposed = True, self._waiting[0]
            chosen = None
            try:
                chosen = self._choose(proposed)
            finally:
                with self._changed:
                    self._is_choosing, self._turn = False, chosen
                    self._changed.notify_all()


@dataclass(frozen=True)
class RanksInTurn(Ranks):
    """The ranks of a group that several threads use.

    Args:
        turns: of all these threads.
        name: of this thread, the same on all ranks.
    """

    turns: Turns = field(default_factory=lambda: Turns(lambda name: name))
    name: str = ""

    def gather_objects(self, value: Any) -> list[Any]:
        with self.turns.turn(self.name):
            return super().gather_objects(value)

    def gather(self, value: Any) -> list[Any] | None:
        with self.turns.turn(self.name):
            return super().gather(value)

    def scatter(self, values: Sequence[Any] | None) -> Any:
        with self.turns.turn(self.name):
            return super().scatter(values)

    def broadcast(self, value: Any) -> Any:
        with self.turns.turn(self.name):
            return super().broadcast(value)


def in_turn(ranks: Ranks, *names: str) -> list[Ranks]:
    """Ranks for several threads, each with a name, that use one group; unchanged if there is one rank."""
    if ranks.size == 1:
        return [ranks] * len(names)
    turns = Turns(ranks.broadcast)
    return [RanksInTurn(ranks.rank, ranks.size, ranks.group, turns, name) for name in names]
