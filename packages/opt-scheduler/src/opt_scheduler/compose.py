"""Schedules made of schedules: joined, repeated, or with other values or times. `recipes` puts curves into them."""

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, ClassVar

from .errors import ScheduleError, check_number, check_optional
from .schedule import Scaled, Schedule, ScheduleLike, Steps, Wrapped, as_schedule, flat_parts
from .shapes import NUMBERS, exact


@dataclass(frozen=True, kw_only=True)  # no slots: the starts of the parts are computed once and kept
class Join(Schedule):
    """One schedule after another; see `join`."""

    kind: ClassVar[str] = "join"
    parts: tuple[Schedule, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ScheduleError("join: needs at least one schedule")
        for i, part in enumerate(self.parts):
            if not isinstance(part, Schedule):
                raise ScheduleError(f"join: part {i} must be a Schedule, not {part!r}")
            if i + 1 < len(self.parts) and math.isinf(part.length):
                raise ScheduleError(
                    f"join: part {i}, {part!r}, has no end, so part {i + 1} never begins; pass steps=, or cut() it"
                )

    @cached_property
    def starts(self) -> Steps:
        """The step at which each part begins."""
        return tuple(accumulate((part.length for part in self.parts[:-1]), initial=0))

    def at(self, step: float) -> float:
        i = bisect_right(self.starts, step) - 1
        return self.parts[i].at(step - self.starts[i])

    def array_at(self, step: Any, xp: Any) -> Any:
        values = self.parts[0].array_at(step, xp)
        for start, part in zip(map(exact, self.starts[1:]), self.parts[1:], strict=True):
            of_part = part.array_at(xp.maximum(step - start, 0), xp)
            values = xp.where(step >= start, of_part, values)
        return values

    @property
    def length(self) -> float:
        return self.starts[-1] + self.parts[-1].length

    @property
    def boundaries(self) -> Steps:
        steps = set(self.starts[1:])
        for start, part in zip(self.starts, self.parts, strict=True):
            steps.update(start + boundary for boundary in part.boundaries)
        return tuple(sorted(steps))


def join(*schedules: ScheduleLike) -> Schedule:
    """Join schedules one after another, each counting from its own step 0. A boundary belongs to the later schedule.

    >>> from opt_scheduler import constant, linear
    >>> join(constant(1.0, steps=90), linear(1.0, 0.0, steps=10)).values([0, 90, 95, 100])
    [1.0, 1.0, 0.5, 0.0]
    """
    return Join(parts=flat_parts(Join, schedules))  # however the parts are bracketed, the result is equal


def followed(schedule: ScheduleLike, rest: Schedule, *, at: float) -> Schedule:
    """Return `schedule` until step `at`, then `rest` from its own step 0."""
    return join(cut(schedule, at), rest) if at > 0 else rest


def scale(schedule: ScheduleLike, factor: float) -> Schedule:
    """Return `factor` times `schedule`.

    >>> from opt_scheduler import linear
    >>> scale(linear(1.0, 0.0, steps=10), 0.5)(5)
    0.25
    """
    return Scaled(schedule=as_schedule(schedule), factor=factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clipped(Wrapped):
    """Another schedule limited to a range; see `clip`."""

    kind: ClassVar[str] = "clip"
    schedule: Schedule
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        for bound in (self.low, self.high):
            check_optional("clip", bound=bound)
        if self.low is None and self.high is None:
            raise ScheduleError("clip: needs low=, high= or both")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ScheduleError(f"clip: low={self.low!r} must be at most high={self.high!r}")

    def array_at(self, step: Any, xp: Any) -> Any:
        values = self.schedule.value_at(step, xp)
        if self.high is not None:
            values = xp.minimum(values, self.high)
        return values if self.low is None else xp.maximum(values, self.low)


def clip(schedule: ScheduleLike, *, low: float | None = None, high: float | None = None) -> Schedule:
    """Keep `schedule` between `low` and `high`. `boundaries` does not list the steps at which it reaches them.

    >>> from opt_scheduler import linear
    >>> clip(linear(1.0, 0.0, steps=10), low=0.2).values([0, 7, 9])
    [1.0, 0.30000000000000004, 0.2]
    """
    return Clipped(schedule=as_schedule(schedule), low=low, high=high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved(Schedule):
    """Another schedule at other times: s(min((step - delay) / stretch, until)); see `shift`, `stretch` and `cut`."""

    kind: ClassVar[str] = "moved"
    schedule: Schedule
    delay: float = 0.0
    stretch: float = 1.0
    until: float | None = None

    def __post_init__(self) -> None:
        check_number("shift", steps=self.delay)
        check_number("stretch", above=0, factor=self.stretch)

    def array_at(self, step: Any, xp: Any) -> Any:
        moved = step - exact(self.delay)
        if self.stretch != 1:
            moved = moved / self.stretch
        moved = xp.maximum(moved, 0)
        if self.until is not None:
            moved = xp.minimum(moved, exact(self.until))
        return self.schedule.value_at(moved, xp)

    @property
    def length(self) -> float:
        length = self.schedule.length if self.until is None else self.until
        return max(length * self.stretch + self.delay, 0.0)

    @property
    def boundaries(self) -> Steps:
        steps = [0.0, *self.schedule.boundaries]
        if self.until is not None:
            steps = [*(step for step in steps if step < self.until), self.until]
        moved = [step * self.stretch + self.delay for step in steps]
        return tuple(step for step in moved if step > 0)


def shift(schedule: ScheduleLike, steps: float) -> Schedule:
    """Delay `schedule` by `steps`, with its first value until then. A negative `steps` moves it earlier.

    >>> from opt_scheduler import linear
    >>> shift(linear(1.0, 0.0, steps=10), 5).values([0, 5, 10, 15])
    [1.0, 1.0, 0.5, 0.0]
    """
    return Moved(schedule=as_schedule(schedule), delay=steps)


def stretch(schedule: ScheduleLike, factor: float) -> Schedule:
    """Make `schedule` `factor` times as long. From steps to samples, `factor` is the batch size.

    >>> from opt_scheduler import linear
    >>> stretch(linear(1.0, 0.0, steps=10), 256)(1280)
    0.5
    """
    return Moved(schedule=as_schedule(schedule), stretch=factor)


def cut(schedule: ScheduleLike, steps: float) -> Schedule:
    """Return the first `steps` of `schedule`, then the value that it has there.

    >>> from opt_scheduler import linear
    >>> cut(linear(1.0, 0.0, steps=10), 5).values([4, 5, 6])
    [0.6, 0.5, 0.5]
    """
    check_number("cut", above=0, steps=steps)
    return Moved(schedule=as_schedule(schedule), until=steps)


@dataclass(frozen=True, kw_only=True)  # no slots: the starts of the periods are computed once and kept
class Restarts(Schedule):
    """A schedule that starts again, each time over other lengths and values; see `restarts`."""

    kind: ClassVar[str] = "restarts"
    schedule: Schedule
    times: int | None = None  # None: without end
    t_mult: float = 1.0
    decay: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.schedule.length < math.inf:
            raise ScheduleError(f"{self.kind}: {self.schedule!r} has no end at which to begin again; pass steps=")
        check_optional(self.kind, low=1, times=self.times)
        check_number(self.kind, above=0, t_mult=self.t_mult, decay=self.decay)
        if self.times is not None and not isinstance(self.times, int):
            raise ScheduleError(f"{self.kind}: times={self.times!r} must be a whole number")
        if self.t_mult < 1 and self.times is None:
            raise ScheduleError(f"restarts: t_mult={self.t_mult!r} makes ever shorter periods; pass times=")

    def start_of(self, period: Any) -> Any:
        """Return the step at which a period begins; the first period has the number 0."""
        first = exact(self.schedule.length)
        m = self.t_mult
        return first * period if m == 1 else first * (m**period - 1) / (m - 1)

    @cached_property
    def starts(self) -> list[float]:
        """The starts of all periods, or of those within 2**53 steps, up to which a float counts exactly."""
        starts = [0.0]
        while len(starts) != self.times and starts[-1] < 2**53:
            starts.append(self.start_of(len(starts)))
        return starts

    def array_at(self, step: Any, xp: Any) -> Any:
        length = exact(self.schedule.length)
        if self.t_mult == 1:
            period = step // length
            period = period + (self.start_of(period + 1) <= step)  # the quotient of fractions is rounded
            if self.times is not None:
                period = xp.minimum(period, self.times - 1)
        elif xp is NUMBERS:
            period = bisect_right(self.starts, step) - 1
        else:
            period = xp.searchsorted(xp.asarray(self.starts, dtype=float), step, side="right") - 1
        local = step - self.start_of(period)
        if self.t_mult != 1:
            local = local / self.t_mult**period
        return self.decay**period * self.schedule.value_at(xp.minimum(local, length), xp)

    @property
    def length(self) -> float:
        return math.inf if self.times is None else self.start_of(self.times)

    @property
    def boundaries(self) -> Steps:
        steps: list[float] = []
        for period in range(self.times or 1):
            for step in {*self.schedule.boundaries, self.schedule.length}:
                steps.append(self.start_of(period) + self.t_mult**period * step)
        return tuple(sorted(steps))


def restarts(schedule: ScheduleLike, *, times: int | None = None, t_mult: float = 1.0, decay: float = 1.0) -> Schedule:
    """Repeat `schedule` from its start whenever it ends: `times` times in all, or forever. Then keep its last value.

    Each period is `t_mult` times as long as the one before, and its values are `decay` times as large: SGDR, section 3
    of https://arxiv.org/abs/1608.03983, with `T_mult`. `clip(..., low=)` keeps a floor that does not decay.

    >>> from opt_scheduler import linear
    >>> restarts(linear(1.0, 0.0, steps=4), times=2, t_mult=2, decay=0.5).values([0, 2, 4, 8, 12, 13])
    [1.0, 0.5, 0.5, 0.25, 0.0, 0.0]

    Raises:
        ScheduleError: `schedule` has no end, `times` is not a whole number of at least 1, `t_mult` or `decay` is not
            above 0, or `t_mult` is below 1 without `times`.
    """
    return Restarts(schedule=as_schedule(schedule), times=times, t_mult=t_mult, decay=decay)


@dataclass(frozen=True, kw_only=True)
class Repeat(Restarts):
    """The same schedule several times, or forever; see `repeat`."""

    kind: ClassVar[str] = "repeat"
    t_mult: float = field(default=1.0, init=False, repr=False)
    decay: float = field(default=1.0, init=False, repr=False)


def repeat(schedule: ScheduleLike, *, times: int | None = None) -> Schedule:
    """Repeat `schedule` from its start whenever it ends: `times` times in all, or forever. Then keep its last value.

    Warm restarts (https://arxiv.org/abs/1608.03983) repeat a cosine, WSD-S (https://arxiv.org/abs/2410.05192) a `wsd`.
    `restarts` also lengthens the periods and lowers the values.

    >>> from opt_scheduler import linear
    >>> repeat(linear(1.0, 0.0, steps=4), times=2).values([0, 2, 4, 6, 8, 9])
    [1.0, 0.5, 1.0, 0.5, 0.0, 0.0]
    """
    return Repeat(schedule=as_schedule(schedule), times=times)
