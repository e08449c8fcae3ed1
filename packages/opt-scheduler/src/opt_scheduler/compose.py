"""Schedules made of schedules: sums and products, warmup, join, scale, clip, shift, stretch, cut, cooldown."""

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, ClassVar

from .arrays import exact
from .curves import ramp
from .errors import ScheduleError
from .schedule import Schedule, ScheduleLike, as_schedule, check_number


class _Combined(Schedule):
    """Several schedules evaluated at the same step. It ends with the last of them."""

    __slots__ = ()

    parts: tuple[Schedule, ...]

    def __post_init__(self) -> None:
        if len(self.parts) < 2 or not all(isinstance(part, Schedule) for part in self.parts):
            raise ScheduleError(f"{self.kind}: parts={self.parts!r} must be at least two schedules")

    @property
    def length(self) -> float:
        return max(part.length for part in self.parts)

    @property
    def boundaries(self) -> tuple[float, ...]:
        return tuple(sorted({boundary for part in self.parts for boundary in part.boundaries}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum(_Combined):
    """The sum of schedules: the value of `a + b`.

    >>> from opt_scheduler import linear
    >>> (linear(1.0, 0.0, steps=4) + linear(0.0, 2.0, steps=8) + 1).values([0, 4, 8])
    [2.0, 2.0, 3.0]
    """

    kind: ClassVar[str] = "sum"
    parts: tuple[Schedule, ...]

    def array_at(self, step: Any, xp: Any) -> Any:
        return sum(part.value_at(step, xp) for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Product(_Combined):
    """The product of schedules: the value of `a * b`.

    >>> from opt_scheduler import linear
    >>> (linear(1.0, 0.0, steps=4) * (lambda step: 0.1 * step)).values([0, 2, 4])
    [0.0, 0.1, 0.0]
    """

    kind: ClassVar[str] = "product"
    parts: tuple[Schedule, ...]

    def array_at(self, step: Any, xp: Any) -> Any:
        return math.prod(part.value_at(step, xp) for part in self.parts)


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
    def starts(self) -> tuple[float, ...]:
        """The step at which each part begins."""
        return tuple(accumulate((part.length for part in self.parts[:-1]), initial=0))

    def at(self, step: float) -> float:
        i = bisect_right(self.starts, step) - 1
        return self.parts[i].at(step - self.starts[i])

    def array_at(self, step: Any, xp: Any) -> Any:
        values = self.parts[0].array_at(step, xp)
        for start, part in zip(map(exact, self.starts[1:]), self.parts[1:], strict=True):
            values = xp.where(step >= start, part.array_at(xp.maximum(step - start, 0), xp), values)
        return values

    @property
    def length(self) -> float:
        return self.starts[-1] + self.parts[-1].length

    @property
    def boundaries(self) -> tuple[float, ...]:
        inner = {s + b for s, part in zip(self.starts, self.parts, strict=True) for b in part.boundaries}
        return tuple(sorted(inner.union(self.starts[1:])))


class _Wrapped(Schedule):
    """A schedule that changes the values of another one and keeps its times."""

    __slots__ = ()

    schedule: Schedule

    @property
    def length(self) -> float:
        return self.schedule.length

    @property
    def boundaries(self) -> tuple[float, ...]:
        return self.schedule.boundaries


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled(_Wrapped):
    """Another schedule times a factor; see `scale`."""

    kind: ClassVar[str] = "scale"
    schedule: Schedule
    factor: float

    def __post_init__(self) -> None:
        check_number("scale", factor=self.factor)

    def array_at(self, step: Any, xp: Any) -> Any:
        return self.factor * self.schedule.value_at(step, xp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clipped(_Wrapped):
    """Another schedule limited to a range; see `clip`."""

    kind: ClassVar[str] = "clip"
    schedule: Schedule
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        for bound in (self.low, self.high):
            check_number("clip", bound=bound)
        if self.low is None and self.high is None:
            raise ScheduleError("clip: needs low=, high= or both")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ScheduleError(f"clip: low={self.low!r} must be at most high={self.high!r}")

    def array_at(self, step: Any, xp: Any) -> Any:
        values = self.schedule.value_at(step, xp)
        if self.high is not None:
            values = xp.minimum(values, self.high)
        return values if self.low is None else xp.maximum(values, self.low)


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
        moved = xp.maximum(moved if self.stretch == 1 else moved / self.stretch, 0)
        return self.schedule.value_at(moved if self.until is None else xp.minimum(moved, exact(self.until)), xp)

    @property
    def length(self) -> float:
        length = self.schedule.length if self.until is None else self.until
        return max(length * self.stretch + self.delay, 0.0)

    @property
    def boundaries(self) -> tuple[float, ...]:
        steps = [0.0] if self.delay > 0 else []
        steps += [step for step in self.schedule.boundaries if self.until is None or step < self.until]
        steps += [] if self.until is None else [self.until]
        return tuple(moved for step in steps if (moved := step * self.stretch + self.delay) > 0)


def join(*schedules: ScheduleLike) -> Schedule:
    """One schedule after another, each counting from its own step 0. A boundary belongs to the later schedule.

    >>> from opt_scheduler import constant, linear
    >>> join(constant(1.0, steps=90), linear(1.0, 0.0, steps=10)).values([0, 90, 95, 100])
    [1.0, 1.0, 0.5, 0.0]
    """
    parts: list[Schedule] = []
    for schedule in map(as_schedule, schedules):  # flat: however the parts are bracketed, the result is equal
        parts += schedule.parts if isinstance(schedule, Join) else [schedule]
    return Join(parts=tuple(parts))


def warmup(schedule: ScheduleLike, *, steps: float, start: float = 0.0, shape: str = "linear") -> Schedule:
    """A rise from `start` to the first value of `schedule` over `steps`, then `schedule` from its own step 0.

    With `start=0` the update at step 0 changes nothing; `start=peak / steps` avoids that. `steps=0` adds no warmup.

    >>> from opt_scheduler import linear
    >>> warmup(linear(1.0, 0.0, steps=10), steps=4).values([0, 1, 2, 3, 4, 5, 14])
    [0.0, 0.25, 0.5, 0.75, 1.0, 0.9, 0.0]
    """
    check_number("warmup", low=0, steps=steps)
    peak = as_schedule(schedule)
    return join(ramp(start, peak(0), steps=steps, shape=shape), peak) if steps > 0 else peak


def scale(schedule: ScheduleLike, factor: float) -> Schedule:
    """`factor` times `schedule`.

    >>> from opt_scheduler import linear
    >>> scale(linear(1.0, 0.0, steps=10), 0.5)(5)
    0.25
    """
    return Scaled(schedule=as_schedule(schedule), factor=factor)


def clip(schedule: ScheduleLike, *, low: float | None = None, high: float | None = None) -> Schedule:
    """`schedule` kept between `low` and `high`. `boundaries` does not list the steps at which it reaches them.

    >>> from opt_scheduler import linear
    >>> clip(linear(1.0, 0.0, steps=10), low=0.2).values([0, 7, 9])
    [1.0, 0.30000000000000004, 0.2]
    """
    return Clipped(schedule=as_schedule(schedule), low=low, high=high)


def shift(schedule: ScheduleLike, steps: float) -> Schedule:
    """`schedule` delayed by `steps`, with its first value until then. A negative `steps` moves it earlier.

    >>> from opt_scheduler import linear
    >>> shift(linear(1.0, 0.0, steps=10), 5).values([0, 5, 10, 15])
    [1.0, 1.0, 0.5, 0.0]
    """
    return Moved(schedule=as_schedule(schedule), delay=steps)


def stretch(schedule: ScheduleLike, factor: float) -> Schedule:
    """`schedule` made `factor` times as long. From steps to samples, `factor` is the batch size.

    >>> from opt_scheduler import linear
    >>> stretch(linear(1.0, 0.0, steps=10), 256)(1280)
    0.5
    """
    return Moved(schedule=as_schedule(schedule), stretch=factor)


def cut(schedule: ScheduleLike, steps: float) -> Schedule:
    """The first `steps` of `schedule`, then the value that it has there.

    >>> from opt_scheduler import linear
    >>> cut(linear(1.0, 0.0, steps=10), 5).values([4, 5, 6])
    [0.6, 0.5, 0.5]
    """
    check_number("cut", above=0, steps=steps)
    return Moved(schedule=as_schedule(schedule), until=steps)


def cooldown(
    schedule: ScheduleLike, *, at: float, steps: float, end: float = 0.0, shape: str = "minus_sqrt"
) -> Schedule:
    """`schedule` until step `at`, then from its value there down to `end` over `steps`.

    This branches a finished model off a run that continues with `schedule`.

    >>> from opt_scheduler import constant
    >>> cooldown(constant(1.0), at=1000, steps=100).values([999, 1000, 1025, 1100])
    [1.0, 1.0, 0.5, 0.0]
    """
    check_number("cooldown", low=0, at=at)
    check_number("cooldown", above=0, steps=steps)
    tail = ramp(as_schedule(schedule)(at), end, steps=steps, shape=shape)
    return join(cut(schedule, at), tail) if at > 0 else tail
