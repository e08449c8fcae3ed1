"""A plain callable of the step as a schedule: a lambda, a function, or a schedule of another library."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .errors import ScheduleError
from .schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Function(Schedule):
    """A callable of the step, which must return the same number for the same step; see `as_schedule`.

    It has no end. `to_dict` records its name only, so `from_dict` cannot rebuild it.

    Raises:
        ScheduleError: when evaluated, if the callable does not take a step or does not return a finite number.
    """

    kind: ClassVar[str] = "function"
    function: Callable[[float], float]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ScheduleError(f"function: {self.function!r} must be a callable that takes the step")

    @property
    def name(self) -> str:
        """The module and qualified name, such as "train.my_schedule"."""
        named = self.function if hasattr(self.function, "__qualname__") else type(self.function)
        return f"{named.__module__}.{named.__qualname__}"

    def at(self, step: float) -> float:
        try:
            value = float(self.function(step))
        except TypeError as error:
            raise ScheduleError(f"function: {self.name}({step!r}) must return a number: {error}") from error
        if not math.isfinite(value):
            raise ScheduleError(f"function: {self.name}({step!r}) returned {value!r}, which is not a finite number")
        return value

    def array_at(self, step: Any, xp: Any) -> Any:
        return self.function(step)

    @property
    def length(self) -> float:
        return math.inf

    @property
    def boundaries(self) -> tuple[float, ...]:
        return ()

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "name": self.name}

    @classmethod
    def from_fields(cls, plain: Mapping[str, Any]) -> Schedule:
        raise ScheduleError(
            f"the schedule {plain.get('name')!r} is a callable of which only the name was saved; pass the callable "
            "itself, or build it from the schedules of this package"
        )
