"""A `Schedule`: a frozen value that gives a number for every step. What all curves and combinators share."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, ClassVar

from .draw import svg_plot, text_plot
from .errors import ScheduleError, unknown_name


class Schedule(ABC):
    """A pure function of the step, as a value: equal if built equally, printable, and convertible to plain types.

    Steps may be fractions. Before step 0 a schedule has its first value, past its end its last: nothing extrapolates.
    Subclasses are frozen dataclasses with a `kind`, the name under which `to_dict` records them; a kind of your own
    takes part in everything once its class exists.

    >>> from opt_scheduler import cosine, warmup
    >>> lr = warmup(cosine(1e-3, 1e-4, steps=100), steps=10)
    >>> lr(5), lr(60), lr(1000)
    (0.0005, 0.00055, 0.0001)
    """

    __slots__ = ()

    kind: ClassVar[str]

    @abstractmethod
    def at(self, step: float) -> float:
        """The value at `step`, which is at least 0."""

    @property
    @abstractmethod
    def length(self) -> float:
        """The step from which on the value no longer changes; `math.inf` if there is none."""

    @property
    @abstractmethod
    def boundaries(self) -> tuple[float, ...]:
        """The steps, ascending, at which one formula hands over to the next, the end included.

        An endless repetition has infinitely many and lists those of its first period.
        """

    @property
    def jumps(self) -> tuple[float, ...]:
        """Those boundaries at which the value jumps: the schedule is continuous everywhere else."""
        return ()

    def __call__(self, step: float) -> float:
        """The value at `step`; a step below 0 counts as 0.

        Raises:
            ScheduleError: `step` is not a number, or is NaN.
        """
        try:
            if step > 0:
                clamped = step
            elif step <= 0:
                clamped = 0
            else:
                raise ScheduleError(f"{self.kind}: step={step!r} must not be NaN")
        except TypeError as error:
            raise ScheduleError(f"{self.kind}: step={step!r} must be a number") from error
        return self.at(clamped)

    def values(self, steps: Iterable[float]) -> list[float]:
        """The value at each of `steps`, for example at a range of them."""
        return [self(step) for step in steps]

    def to_dict(self) -> dict[str, Any]:
        """This schedule in plain types, ready for JSON or TOML; fields that are None are left out.

        >>> from opt_scheduler import linear
        >>> linear(1.0, 0.0, steps=10).to_dict()
        {'kind': 'ramp', 'start': 1.0, 'end': 0.0, 'steps': 10, 'shape': 'linear'}
        """
        items = ((field.name, _plain(getattr(self, field.name))) for field in fields(self))  # type: ignore[arg-type]
        return {"kind": self.kind} | {name: value for name, value in items if value is not None}

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> "Schedule":
        """The schedule that `to_dict` made `plain` from.

        Raises:
            ScheduleError: an unknown kind, an unknown or missing field, or values that the schedule refuses.
        """
        if not isinstance(plain, Mapping) or "kind" not in plain:
            raise ScheduleError(f"a schedule's dict needs a 'kind', but this was given: {plain!r}")
        kinds = _kinds()
        if plain["kind"] not in kinds:
            raise ScheduleError(unknown_name("kind", plain["kind"], kinds))
        cls = kinds[plain["kind"]]
        known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        given = {name: _unplain(value) for name, value in plain.items() if name != "kind"}
        for name in given:
            if name not in known:
                raise ScheduleError(unknown_name(f"schedule {cls.kind!r}: field", name, known))
        try:
            return cls(**given)
        except TypeError as error:
            raise ScheduleError(f"schedule {cls.kind!r} cannot be built from {dict(plain)!r}: {error}") from error

    def plot(self, *, steps: float | None = None, width: int = 72, height: int = 14) -> str:
        """The curve in characters, for a terminal; `steps` is how far to look, `horizon()` unless given."""
        return text_plot([self], steps=self.horizon() if steps is None else steps, width=width, height=height)

    def _repr_html_(self) -> str:
        """What a notebook shows: the curve as an SVG."""
        return svg_plot([self], steps=self.horizon())

    def horizon(self) -> float:
        """How far to look to see it all: a little past the end, or three periods of an endless repetition."""
        last = self.boundaries[-1] if self.boundaries else 1.0
        return 3 * last if math.isinf(self.length) else 1.05 * last


def check_number(where: str, *, low: float = -math.inf, above: float = -math.inf, **given: float | None) -> None:
    """Refuse what is not a finite number, at least `low` and more than `above`. None is a field not given."""
    for name, value in given.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ScheduleError(f"{where}: {name}={value!r} must be a finite number")
        if value < low:
            raise ScheduleError(f"{where}: {name}={value!r} must be at least {low:g}")
        if value <= above:
            raise ScheduleError(f"{where}: {name}={value!r} must be more than {above:g}")


def _plain(value: object) -> object:
    if isinstance(value, Schedule):
        return value.to_dict()
    return [_plain(v) for v in value] if isinstance(value, tuple) else value


def _unplain(value: object) -> object:
    if isinstance(value, Mapping):
        return Schedule.from_dict(value)
    return tuple(_unplain(v) for v in value) if isinstance(value, list | tuple) else value


def _kinds() -> dict[str, type[Schedule]]:
    """All kinds by name. Python's own record of subclasses is the registry, so there is none to keep in step."""
    found: dict[str, type[Schedule]] = {}
    waiting = Schedule.__subclasses__()
    while waiting:
        cls = waiting.pop(0)
        waiting += cls.__subclasses__()
        if "kind" not in vars(cls):
            continue
        # A dataclass with slots is made twice from one definition; the later class is the one to use.
        if (other := found.setdefault(cls.kind, cls)).__qualname__ != cls.__qualname__:
            raise ScheduleError(f"two schedules have the kind {cls.kind!r}: {other!r} and {cls!r}; rename one")
        found[cls.kind] = cls
    return found
