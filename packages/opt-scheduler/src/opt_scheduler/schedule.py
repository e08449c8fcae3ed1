"""`Schedule`: an immutable function of the step. Base class of all curves and combinators."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, ClassVar, TypeAlias, overload

from .arrays import NUMBERS, Array, is_array, namespace, usable_steps
from .draw import svg_plot, text_plot
from .errors import ScheduleError, unknown_name


class Schedule(ABC):
    """A pure function of the step that is also a value: comparable, hashable, printable and serializable.

    Steps may be fractions. Below step 0 a schedule has its first value, past its end its last one; nothing is
    extrapolated. A step may also be an array of a library with the array API, such as NumPy or JAX, under `jax.jit`
    too; the result is then an array of the same shape in the library's default float.

    Schedules and other callables of the step can be added and multiplied, and numbers work too: `schedule * 0.1`,
    `schedule + other`, `schedule * other`, `schedule - 1e-5`, `schedule / 2`.

    Subclasses are frozen dataclasses with a `kind`, the name that `to_dict` records. They define `at` for numbers,
    `array_at` for arrays, or only `array_at` with functions that `arrays.NUMBERS` has too. Defining a subclass
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
        """Return `at(step)` if `xp` is `arrays.NUMBERS`, else `array_at(step, xp)`."""
        return self.at(step) if xp is NUMBERS else self.array_at(step, xp)

    @property
    @abstractmethod
    def length(self) -> float:
        """The step from which the value stays the same; `math.inf` if there is none."""

    @property
    @abstractmethod
    def boundaries(self) -> tuple[float, ...]:
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
        if type(step) is not int and type(step) is not float and is_array(step):
            xp = namespace(step)
            return self.array_at(xp.maximum(usable_steps(step), 0), xp)
        try:
            if step > 0:
                clamped = step
            elif step <= 0:
                clamped = 0
            else:
                raise ScheduleError(f"{self.kind}: step={step!r} must not be NaN")
        except (TypeError, RuntimeError) as error:
            raise ScheduleError(f"{self.kind}: step={step!r} must be a number or an array of numpy or jax") from error
        return self.at(clamped)

    def values(self, steps: Iterable[float]) -> list[float]:
        """Return the value at each of `steps`, for example of a range."""
        return [self(step) for step in steps]

    def __mul__(self, other: "ScheduleLike") -> "Schedule":
        if is_number(other):
            return of_kind("scale", schedule=self, factor=other)
        return _combined("product", self, other) if callable(other) else NotImplemented

    def __rmul__(self, other: "ScheduleLike") -> "Schedule":
        return self * other if is_number(other) else _combined("product", other, self)

    def __truediv__(self, other: float) -> "Schedule":
        if not is_number(other) or other == 0:
            raise ScheduleError(f"{self.kind}: a schedule can be divided by a number other than 0, not by {other!r}")
        return self * (1.0 / other)

    def __add__(self, other: "ScheduleLike") -> "Schedule":
        return _combined("sum", self, other) if callable(other) or is_number(other) else NotImplemented

    def __radd__(self, other: "ScheduleLike") -> "Schedule":
        return _combined("sum", other, self)

    def __sub__(self, other: "ScheduleLike") -> "Schedule":
        return self + -as_schedule(other) if callable(other) or is_number(other) else NotImplemented

    def __rsub__(self, other: "ScheduleLike") -> "Schedule":
        return as_schedule(other) + -self

    def __neg__(self) -> "Schedule":
        return self * -1.0

    def to_dict(self) -> dict[str, Any]:
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
        return of_kind("constant", value=given)
    if callable(given):
        return of_kind("function", function=given)
    raise ScheduleError(f"schedule={given!r} must be a Schedule, a number, or a callable that takes the step")


def is_number(value: object) -> bool:
    """Whether `value` is an int or a float, and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_number(where: str, *, low: float = -math.inf, above: float = -math.inf, **given: float | None) -> None:
    """Raise `ScheduleError` unless every value is a finite number, at least `low` and more than `above`.

    None stands for an argument that was not given.
    """
    for name, value in given.items():
        if value is None:
            continue
        if not is_number(value) or not math.isfinite(value):
            raise ScheduleError(f"{where}: {name}={value!r} must be a finite number{_quoted_number(value)}")
        if value < low:
            raise ScheduleError(f"{where}: {name}={value!r} must be at least {low:g}")
        if value <= above:
            raise ScheduleError(f"{where}: {name}={value!r} must be more than {above:g}")


def _quoted_number(value: object) -> str:
    """The hint for a number that a YAML file gave as text."""
    try:
        text = isinstance(value, str) and math.isfinite(float(value))
    except ValueError:
        return ""
    return ", not text; YAML reads 1e-4 as text and 1.0e-4 as a number" if text else ""


def _combined(kind: str, *given: "ScheduleLike") -> Schedule:
    """The sum or product of `given`, flat: however the terms were bracketed, the values are equal."""
    parts: list[Schedule] = []
    for part in map(as_schedule, given):
        parts += part.parts if part.kind == kind else [part]  # type: ignore[attr-defined]
    return of_kind(kind, parts=tuple(parts))


def _plain(value: object) -> object:
    if isinstance(value, Schedule):
        return value.to_dict()
    return [_plain(v) for v in value] if isinstance(value, tuple) else value


def _unplain(value: object) -> object:
    if isinstance(value, Mapping):
        return Schedule.from_dict(value)
    return tuple(_unplain(v) for v in value) if isinstance(value, list | tuple) else value


def of_kind(kind: str, **given: Any) -> Schedule:
    """Build a schedule of the kind with this name, which a module above this one defines."""
    return _kinds()[kind](**given)


def _kinds() -> dict[str, type[Schedule]]:
    """All kinds by name. Python records the subclasses of a class, so no registry has to be kept."""
    found: dict[str, type[Schedule]] = {}
    waiting = Schedule.__subclasses__()
    while waiting:
        cls = waiting.pop(0)
        waiting += cls.__subclasses__()
        if "kind" not in vars(cls):
            continue
        # A dataclass with slots is created twice from one definition; the later class is the one to use.
        if (other := found.setdefault(cls.kind, cls)).__qualname__ != cls.__qualname__:
            raise ScheduleError(f"two schedules have the kind {cls.kind!r}: {other!r} and {cls!r}; rename one")
        found[cls.kind] = cls
    return found
