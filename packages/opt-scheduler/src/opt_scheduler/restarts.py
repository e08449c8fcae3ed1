"""Schedules that begin again: repeat, and warm restarts whose periods grow or shrink and whose values decay."""

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from .arrays import exact
from .errors import ScheduleError
from .schedule import Schedule, ScheduleLike, as_schedule, check_number


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
            verb = "restart" if self.kind == "restarts" else "begin again"
            raise ScheduleError(f"{self.kind}: {self.schedule!r} has no end at which to {verb}; pass steps=")
        check_number(self.kind, low=1, times=self.times)
        check_number(self.kind, above=0, t_mult=self.t_mult, decay=self.decay)
        if self.times is not None and not isinstance(self.times, int):
            raise ScheduleError(f"{self.kind}: times={self.times!r} must be a whole number")
        if self.t_mult < 1 and self.times is None:
            raise ScheduleError(f"restarts: t_mult={self.t_mult!r} makes ever shorter periods; pass times=")

    def start_of(self, period: int) -> float:
        """Return the step at which a period begins; the first period has the number 0."""
        first = self.schedule.length
        m = self.t_mult
        return first * period if m == 1 else first * (m**period - 1) / (m - 1)

    @cached_property
    def starts(self) -> list[float]:
        """The starts of all periods, or of those within 2**53 steps, up to which a float counts exactly."""
        starts = [0.0]
        while len(starts) != self.times and starts[-1] < 2**53:
            starts.append(self.start_of(len(starts)))
        return starts

    def at(self, step: float) -> float:
        if self.t_mult == 1:
            period = int(step // self.schedule.length)
            period += self.start_of(period + 1) <= step  # the quotient of fractions is rounded
            period = period if self.times is None else min(period, self.times - 1)
        else:
            period = bisect_right(self.starts, step) - 1
        local = (step - self.start_of(period)) / self.t_mult**period
        return self.decay**period * self.schedule.at(min(local, self.schedule.length))

    def array_at(self, step: Any, xp: Any) -> Any:
        if self.t_mult == 1:
            length = exact(self.schedule.length)
            period = step // length if self.times is None else xp.minimum(step // length, self.times - 1)
            local = step - period * length
        else:
            starts = xp.asarray(self.starts, dtype=float)
            period = xp.searchsorted(starts, step, side="right") - 1
            local = (step - starts[period]) / self.t_mult**period
        return self.decay**period * self.schedule.array_at(xp.minimum(local, exact(self.schedule.length)), xp)

    @property
    def length(self) -> float:
        return math.inf if self.times is None else self.start_of(self.times)

    @property
    def boundaries(self) -> tuple[float, ...]:
        return self._over_periods(tuple({*self.schedule.boundaries, self.schedule.length}))

    def _over_periods(self, steps: tuple[float, ...]) -> tuple[float, ...]:
        periods = range(self.times or 1)
        return tuple(sorted(self.start_of(i) + self.t_mult**i * step for i in periods for step in steps))


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
