"""Sums and products of schedules: the results of `+` and `*`."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from .errors import ScheduleError
from .schedule import Schedule, differ


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

    @property
    def jumps(self) -> tuple[float, ...]:
        jumps = sorted({jump for part in self.parts for jump in part.jumps})
        return tuple(jump for jump in jumps if differ(self.at(math.nextafter(jump, 0.0)), self.at(jump)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum(_Combined):
    """The sum of schedules: the value of `a + b`.

    >>> from opt_scheduler import linear
    >>> (linear(1.0, 0.0, steps=4) + linear(0.0, 2.0, steps=8) + 1).values([0, 4, 8])
    [2.0, 2.0, 3.0]
    """

    kind: ClassVar[str] = "sum"
    parts: tuple[Schedule, ...]

    def at(self, step: float) -> float:
        return sum(part.at(step) for part in self.parts)

    def array_at(self, step: Any, xp: Any) -> Any:
        return sum(part.array_at(step, xp) for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Product(_Combined):
    """The product of schedules: the value of `a * b`.

    >>> from opt_scheduler import linear
    >>> (linear(1.0, 0.0, steps=4) * (lambda step: 0.1 * step)).values([0, 2, 4])
    [0.0, 0.1, 0.0]
    """

    kind: ClassVar[str] = "product"
    parts: tuple[Schedule, ...]

    def at(self, step: float) -> float:
        return math.prod(part.at(step) for part in self.parts)

    def array_at(self, step: Any, xp: Any) -> Any:
        return math.prod(part.array_at(step, xp) for part in self.parts)
