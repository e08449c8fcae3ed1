"""Queues of work over all ranks of a world, which runs later, in any order that streams and events allow.

A seeded scheduler picks among the heads of all queues. Ranks are threads of which one runs at a time. The turn passes
to another rank when a rank must wait, and sometimes at random. So a seed reproduces an order exactly.
"""

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from random import Random
from typing import Any

EAGERNESS = (0.0, 0.3, 0.9)
"""Probabilities, of which a world draws one, that queued work runs before the host queues more."""
CHANCE_OF_A_TURN = 0.02  # probability that another rank takes its turn when a rank queues something
TIMEOUT_S = 300.0  # for a rank that waits for its turn; the other may compile sweeps


class DeadlockError(RuntimeError):
    """Every rank waits, and no queued work can run."""


class Stopped(RuntimeError):
    """Another rank raised an error."""


@dataclass(slots=True, eq=False)
class Task:
    """An entry of a queue."""

    name: str
    run: Callable[[], None] | None = None  # None: a wait
    after: "tuple[Event, ...]" = ()
    meeting: "Meeting | None" = None  # with tasks of other ranks, which run at the same time
    seconds: float = 0.0  # on the clock of a world with `Rates`


class Queue:
    """A stream: its tasks run in order."""

    def __init__(self, world: "World", rank: int, name: str):
        self.world = world
        self.rank = rank
        self.name = name
        self.tasks: deque[Task] = deque()
        self.num_done = 0
        self.ends = [0.0]  # when each task ended, by the clock; first, when the queue began
        world.queues.append(self)

    def push(self, task: Task) -> None:
        self.tasks.append(task)
        self.world.moved()

    def record_event(self) -> "Event":
        return Event(self, self.num_done + len(self.tasks))

    def wait_event(self, event: "Event") -> None:
        self.push(Task("wait", after=(event,)))

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def earliest(self, task: Task) -> float:
        """When the task at the head may begin, by the clock."""
        return max([self.ends[-1], *(event.time for event in task.after)])

    def pop(self, end: float) -> Task:
        """Remove the task at the head, which ends at `end`."""
        self.num_done += 1
        self.ends.append(end)
        return self.tasks.popleft()


class Event:
    """A point in a queue."""

    def __init__(self, queue: Queue, position: int):
        self._queue = queue
        self._position = position

    @property
    def is_complete(self) -> bool:
        return self._queue.num_done >= self._position

    @property
    def time(self) -> float:
        """When it was reached, by the clock; it is complete."""
        return self._queue.ends[self._position]

    def synchronize(self) -> None:
        self._queue.world.block_until(lambda: self.is_complete, self._queue.rank)


@dataclass(slots=True, eq=False)
class Meeting:
    """One collective: a task on each rank of a group, which all run together."""

    kind: str
    size: int
    run: Callable[[list[Any]], None]
    payloads: dict[int, Any] = field(default_factory=dict)  # by rank in the group
    members: list[tuple[Queue, Task]] = field(default_factory=list)

    def is_ready(self) -> bool:
        return len(self.members) == self.size and all(
            queue.tasks and queue.tasks[0] is task and all(event.is_complete for event in task.after)
            for queue, task in self.members
        )

    def execute(self) -> None:
        begin = max(queue.earliest(task) for queue, task in self.members)
        end = begin + max(task.seconds for _, task in self.members)
        for queue, task in self.members:
            queue.pop(end)
            if task.run is not None:
                task.run()
        self.run([self.payloads[rank] for rank in range(self.size)])
        self.payloads.clear()


Rates = Callable[[str, Any], float]
"""Seconds that a task takes, by its name and what it is given. Streams, events and collectives decide when it begins,
and not the order in which the world happens to run it."""


class World:
    """The queues of all ranks, and whose turn it is."""

    def __init__(
        self,
        size: int,
        *,
        seed: int,
        eagerness: float | None = None,
        at_once: Callable[[], AbstractContextManager[None]] = nullcontext,
        rates: Rates = lambda name, given: 0.0,
    ):
        self.size = size
        self.rates = rates
        self.at_once = at_once  # context in which tasks run
        self.random = Random(seed)
        self.eagerness = self.random.choice(EAGERNESS) if eagerness is None else eagerness
        self.queues: list[Queue] = []
        self.failed = False
        self._turn = 0
        self._changed = threading.Condition()
        self._live = set(range(size))
        self._stuck: set[int] = set()  # ranks that have waited in vain since the last progress

    def moved(self) -> None:
        """Note progress: something was queued or has run, so waiting ranks must check again."""
        self._stuck.clear()

    def advance(self) -> bool:
        """Run one of the tasks that may run now. False if no task may."""
        heads = [queue for queue in self.queues if queue.tasks and _may_run(queue.tasks[0])]
        if not heads:
            return False
        queue = self.random.choice(heads)
        meeting = queue.tasks[0].meeting
        with self.at_once():
            if meeting is not None:
                meeting.execute()
            elif (run := queue.pop(queue.earliest(queue.tasks[0]) + queue.tasks[0].seconds).run) is not None:
                run()
        self.moved()
        return True

    def go_on(self, rank: int) -> None:
        """Let the device, and sometimes another rank, make progress."""
        while self.random.random() < self.eagerness and self.advance():
            pass
        if self.random.random() < CHANCE_OF_A_TURN:
            self._pass_turn(rank)

    def block_until(self, is_met: Callable[[], bool], rank: int) -> None:
        """Run queued work and other ranks until the condition is met.

        Raises:
            DeadlockError: all ranks wait, and no work can run.
            Stopped: another rank raised an error.
        """
        while not is_met():
            if self.advance():
                continue
            self._stuck.add(rank)
            if self._stuck >= self._live:
                heads = [f"rank {q.rank}, {q.name}: {q.tasks[0].name}" for q in self.queues if q.tasks]
                raise DeadlockError(f"all ranks wait; heads of the queues: {'; '.join(heads) or 'none'}")
            self._pass_turn(rank)

    def end(self, rank: int, *, failed: bool) -> None:
        """End the rank: it takes no more turns."""
        with self._changed:
            self.failed = self.failed or failed
            self._live.discard(rank)
        self._give_turn(rank)

    def _pass_turn(self, rank: int) -> None:
        self._give_turn(rank)
        self.wait_for_turn(rank)

    def wait_for_turn(self, rank: int) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._turn == rank or self.failed, timeout=TIMEOUT_S):
                raise DeadlockError(f"rank {rank} had no turn for {TIMEOUT_S} s")
        if self.failed:
            raise Stopped("another rank raised an error")

    def _give_turn(self, rank: int) -> None:
        with self._changed:
            self._turn = min(self._live, key=lambda other: (other - rank - 1) % self.size, default=rank)
            self._changed.notify_all()


def _may_run(task: Task) -> bool:
    if task.meeting is not None:
        return task.meeting.is_ready()
    return all(event.is_complete for event in task.after)
