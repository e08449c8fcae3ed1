"""`Schedule`: an immutable function of the step, and the schedules that its operators and `as_schedule` make.

Steps may be arrays of NumPy or JAX. They are recognized by the array API standard, so that neither is imported.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from numbers import Number
from typing import Any, ClassVar, TypeAlias, overload

from .draw import svg_plot, text_plot
from .errors import ScheduleError, check_number, check_optional, is_number, unknown_name
from .shapes import NUMBERS, Array

Plain: TypeAlias = dict[str, Any]  # a schedule or the state of a scheduler, in types of JSON
Steps: TypeAlias = tuple[float, ...]  # ascending

# Steps of other dtypes are converted: unsigned ones wrap below 0, and short ones cannot hold the length of a run.
_USABLE_DTYPES = ("int32", "int64", "float32", "float64")


class Schedule(ABC):
    """A pure function of the step that is also a value: comparable, hashable, printable and serializable.

    Steps may be fractions. Below step 0 a schedule has its first value, past its end its last one; nothing is
    extrapolated. A step may also be an array of a library with the array API, such as NumPy or JAX, under `jax.jit`
    too; the result is then an array of the same shape in the library's default float.

    Schedules and other callables of the step can be added and multiplied, and numbers work too: `schedule * 0.1`,
    `schedule + other`, `schedule * other`, `schedule - 1e-5`, `schedule / 2`.

    Subclasses are frozen dataclasses with a `kind`, the name that `to_dict` records. They define `at` for numbers,
    `array_at` for arrays, or only `array_at` with functions that `shapes.NUMBERS` has too. Defining a subclass
    registers its kind.

    >>> from opt_scheduler import cosine, warmup
    >>> lr = warmup(cosine(1e-3, 1e-4, steps=100), steps=10)
    >>> lr(5), lr(60), lr(1000)
    (0.0005, 0.00055, 0.0001)
    >>> (lr * 0.1)(5)
    5e-05
    """

    __slots__ = ()

    kind: ClassVar[str]

    def at(self, step: float) -> float:
        """Return the value at `step`, a number of at least 0."""
        return float(self.array_at(step, NUMBERS))

    def array_at(self, step: Any, xp: Any) -> Any:
        """Return the values at an array of steps, all at least 0, using the functions of the array library `xp`.

        Raises:
            ScheduleError: the subclass does not define it.
        """
        raise ScheduleError(
            f"{self.kind}: {type(self).__name__} has no array_at(step, xp), so arrays of steps cannot be used; define "
            "it, or call values() with a list of numbers"
        )

    def value_at(self, step: Any, xp: Any) -> Any:
        """Return `at(step)` if `xp` is `shapes.NUMBERS`, else `array_at(step, xp)`."""
        return self.at(step) if xp is NUMBERS else self.array_at(step, xp)

    @property
    @abstractmethod
    def length(self) -> float:
        """The step from which the value stays the same; `math.inf` if there is none."""

    @property
    @abstractmethod
    def boundaries(self) -> Steps:
        """The steps, ascending, at which one formula takes over from another, the end included.

        A schedule that repeats without end lists the boundaries of its first period.
        """

    @overload
    def __call__(self, step: float) -> float: ...
    @overload
    def __call__(self, step: Array) -> Any: ...
    def __call__(self, step: Any) -> Any:
        """Return the value at `step`, a number or an array. Steps below 0 count as 0.

        Raises:
            ScheduleError: `step` is neither a number nor an array of the array API, or is NaN.
        """
        if hasattr(step, "__array_namespace__") and not isinstance(step, Number):  # a NumPy scalar is a number
            xp = step.__array_namespace__()
            usable = step if str(step.dtype) in _USABLE_DTYPES else step.astype(float)
            return self.array_at(xp.maximum(usable, 0), xp)
        try:
            clamped = step if step > 0 else 0
            is_nan = step != step
        except (TypeError, RuntimeError) as error:
            raise ScheduleError(f"{self.kind}: step={step!r} must be a number or an array of numpy or jax") from error
        if is_nan:
            raise ScheduleError(f"{self.kind}: step={step!r} must not be NaN")
        return self.at(clamped)

    def values(self, steps: Iterable[float]) -> list[float]:
        """Return the value at each of `steps`, for example of a range."""
        return [self(step) for step in steps]

    def __mul__(self, other: "ScheduleLike") -> "Schedule":
        if is_number(other):
            return Scaled(schedule=self, factor=other)
        return Product.of(self, other) if callable(other) else NotImplemented

    def __rmul__(self, other: "ScheduleLike") -> "Schedule":
        return self * other if is_number(other) else Product.of(other, self)

    def __truediv__(self, other: float) -> "Schedule":
        if not is_number(other) or other == 0:
            raise ScheduleError(f"{self.kind}: a schedule can be divided by a number other than 0, not by {other!r}")
        return self * (1.0 / other)

    def __add__(self, other: "ScheduleLike") -> "Schedule":
        return Sum.of(self, other) if callable(other) or is_number(other) else NotImplemented

    def __radd__(self, other: "ScheduleLike") -> "Schedule":
        return Sum.of(other, self)

    def __sub__(self, other: "ScheduleLike") -> "Schedule":
        return self + -as_schedule(other) if callable(other) or is_number(other) else NotImplemented

    def __rsub__(self, other: "ScheduleLike") -> "Schedule":
        return as_schedule(other) + -self

    def __neg__(self) -> "Schedule":
        return self * -1.0

    def to_dict(self) -> Plain:
        """Return this schedule in plain types, ready for JSON or TOML. Fields that are None are left out.

        >>> from opt_scheduler import linear
        >>> linear(1.0, 0.0, steps=10).to_dict()
        {'kind': 'ramp', 'start': 1.0, 'end': 0.0, 'steps': 10, 'shape': 'linear'}
        """
        items = ((name, _plain(getattr(self, name))) for name in self._field_names())
        return {"kind": self.kind} | {name: value for name, value in items if value is not None}

    @classmethod
    def _field_names(cls) -> list[str]:
        return [field.name for field in fields(cls) if field.init]  # type: ignore[arg-type]

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> "Schedule":
        """Rebuild a schedule from the result of `to_dict`.

        Raises:
            ScheduleError: an unknown kind, an unknown or missing field, invalid values, or a plain callable, of which
                only the name was recorded.
        """
        if not isinstance(plain, Mapping) or "kind" not in plain:
            raise ScheduleError(f"a schedule is a dict or table with a 'kind', as to_dict() writes it, not {plain!r}")
        kinds = _kinds()
        if plain["kind"] not in kinds:
            raise ScheduleError(unknown_name("kind", plain["kind"], kinds))
        return kinds[plain["kind"]].from_fields({name: plain[name] for name in plain if name != "kind"})

    @classmethod
    def from_fields(cls, plain: Mapping[str, Any]) -> "Schedule":
        """Build a schedule of this kind from its fields in plain types; see `from_dict`."""
        known = cls._field_names()
        for name in plain:
            if name not in known:
                raise ScheduleError(unknown_name(f"schedule {cls.kind!r}: field", name, known))
        try:
            return cls(**{name: _unplain(value) for name, value in plain.items()})
        except TypeError as error:
            given = {"kind": cls.kind, **plain}
            raise ScheduleError(f"schedule {cls.kind!r} cannot be built from {given!r}: {error}") from error

    def plot(self, *, steps: float | None = None, width: int = 72, height: int = 14) -> str:
        """Return the curve from step 0 to `steps` as text for a terminal; `steps` defaults to `horizon()`."""
        return text_plot([self], steps=self.horizon() if steps is None else steps, width=width, height=height)

    def _repr_html_(self) -> str:
        """Return the curve as an SVG, which notebooks display."""
        return svg_plot([self], steps=self.horizon())

    def horizon(self) -> float:
        """Return the last step worth plotting: a little past the end, or three periods of an endless repetition."""
        last = self.boundaries[-1] if self.boundaries else 1.0
        return 3 * last if math.isinf(self.length) else 1.05 * last


ScheduleLike: TypeAlias = Schedule | Callable[[float], float] | float


def as_schedule(given: object) -> Schedule:
    """Return `given` as a `Schedule`: itself, a constant for a number, or a wrapper for another callable of the step.

    To give a callable an end, which `join` and `repeat` need, cut it: `cut(f, 1000)`.

    >>> as_schedule(lambda step: 1e-3 / (1 + step))(9)
    0.0001
    >>> as_schedule(0.1)(50)
    0.1

    Raises:
        ScheduleError: `given` is of another type.
    """
    if isinstance(given, Schedule):
        return given
    if is_number(given):
        return Constant(value=given)
    if callable(given):
        return Function(function=given)
    raise ScheduleError(f"schedule={given!r} must be a Schedule, a number, or a callable that takes the step")


def _plain(value: object) -> object:
    if isinstance(value, Schedule):
        return value.to_dict()
    return [_plain(v) for v in value] if isinstance(value, tuple) else value


def _unplain(value: object) -> object:
    if isinstance(value, Mapping):
        return Schedule.from_dict(value)
    return tuple(_unplain(v) for v in value) if isinstance(value, list | tuple) else value


def _kinds() -> dict[str, type[Schedule]]:
    """All kinds by name. Python records the subclasses of a class, so no registry has to be kept."""
    found: dict[str, type[Schedule]] = {}
    classes = Schedule.__subclasses__()
    for cls in classes:
        classes += cls.__subclasses__()  # the loop goes on over these
        if "kind" not in vars(cls):
            continue
        # A dataclass with slots is created twice from one definition; the later class is the one to use.
        other = found.get(cls.kind, cls)
        if other.__qualname__ != cls.__qualname__:
            raise ScheduleError(f"two schedules have the kind {cls.kind!r}: {other!r} and {cls!r}; rename one")
        found[cls.kind] = cls
    return found


class Timed(Schedule):
    """A schedule with a field `steps`: it ends there, or never if `steps` is None."""

    __slots__ = ()

    steps: float | None

    @property
    def length(self) -> float:
        return math.inf if self.steps is None else self.steps

    @property
    def boundaries(self) -> Steps:
        return () if self.steps is None else (self.steps,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant(Timed):
    """The same value at every step; see `constant`."""

    kind: ClassVar[str] = "constant"
    value: float
    steps: float | None = None

    def __post_init__(self) -> None:
        check_number("constant", value=self.value)
        check_optional("constant", above=0, steps=self.steps)

    def array_at(self, step: Any, xp: Any) -> Any:
        return xp.full_like(step, self.value, dtype=float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Function(Timed):
    """A callable of the step, which must return the same number for the same step; see `as_schedule`.

    It has no end. `to_dict` records its name only, so `from_dict` cannot rebuild it.

    Raises:
        ScheduleError: when evaluated, if the callable does not take a step or does not return a finite number.
    """

    kind: ClassVar[str] = "function"
    function: Callable[[float], float]
    steps = None

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

    def to_dict(self) -> Plain:
        return {"kind": self.kind, "name": self.name}

    @classmethod
    def from_fields(cls, plain: Mapping[str, Any]) -> Schedule:
        raise ScheduleError(
            f"the schedule {plain.get('name')!r} is a callable of which only the name was saved; pass the callable "
            "itself, or build it from the schedules of this package"
        )


class Wrapped(Schedule):
    """A schedule that changes the values of another one and keeps its times."""

    __slots__ = ()

    schedule: Schedule

    @property
    def length(self) -> float:
        return self.schedule.length

    @property
    def boundaries(self) -> Steps:
        return self.schedule.boundaries


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled(Wrapped):
    """Another schedule times a factor; see `scale`."""

    kind: ClassVar[str] = "scale"
    schedule: Schedule
    factor: float

    def __post_init__(self) -> None:
        check_number("scale", factor=self.factor)

    def array_at(self, step: Any, xp: Any) -> Any:
        return self.factor * self.schedule.value_at(step, xp)


def flat_parts(kind: type[Any], given: Iterable[ScheduleLike]) -> tuple[Schedule, ...]:
    """Return `given` as schedules, with the parts of those of a `kind` in their place."""
    parts: list[Schedule] = []
    for part in map(as_schedule, given):
        parts += part.parts if isinstance(part, kind) else [part]
    return tuple(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Combined(Schedule):
    """Several schedules evaluated at the same step. It ends with the last of them."""

    parts: tuple[Schedule, ...]

    def __post_init__(self) -> None:
        if len(self.parts) < 2 or not all(isinstance(part, Schedule) for part in self.parts):
            raise ScheduleError(f"{self.kind}: parts={self.parts!r} must be at least two schedules")

    @classmethod
    def of(cls, *given: ScheduleLike) -> Schedule:
        """Combine `given` into a flat schedule: however the terms were bracketed, the values are equal."""
        return cls(parts=flat_parts(cls, given))

    @property
    def length(self) -> float:
        return max(part.length for part in self.parts)

    @property
    def boundaries(self) -> Steps:
        return tuple(sorted({boundary for part in self.parts for boundary in part.boundaries}))


class Sum(Combined):
    """The sum of schedules: the value of `a + b`.

    >>> from opt_scheduler import linear
    >>> (linear(1.0, 0.0, steps=4) + linear(0.0, 2.0, steps=8) + 1).values([0, 4, 8])
    [2.0, 2.0, 3.0]
    """

    __slots__ = ()

    kind: ClassVar[str] = "sum"

    def array_at(self, step: Any, xp: Any) -> Any:
        return sum(part.value_at(step, xp) for part in self.parts)


class Product(Combined):
    """The product of schedules: the value of `a * b`.

    >>> from opt_scheduler import linear
    >>> (linear(1.0, 0.0, steps=4) * (lambda step: 0.1 * step)).values([0, 2, 4])
    [0.0, 0.1, 0.0]
    """

    __slots__ = ()

    kind: ClassVar[str] = "product"

    def array_at(self, step: Any, xp: Any) -> Any:
        return math.prod(part.value_at(step, xp) for part in self.parts)
