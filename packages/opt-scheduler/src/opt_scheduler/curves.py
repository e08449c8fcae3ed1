"""The elementary schedules: each is one formula of the step. `compose` and `recipes` combine them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass
from inspect import Parameter, signature
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple, TypeVar

from .errors import ScheduleError, check_number, check_optional, unknown_name
from .schedule import Constant, Schedule, Steps, Timed
from .shapes import SHAPES, exact

Build = TypeVar("Build", bound=Callable[..., Schedule])


class Named(NamedTuple):
    """How `get_schedule` builds the schedule of one name."""

    build: Callable[..., Schedule]
    defaults: dict[str, Any]  # of arguments that the function requires
    has_warmup: bool  # whether get_schedule puts a warmup before it, which its `steps` do not contain

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that `get_schedule` takes, with their defaults, or `Parameter.empty`."""
        parameters = {each.name: each.default for each in signature(self.build).parameters.values()}
        if not self.has_warmup:
            return parameters
        _, *names = parameters  # the first is the peak, under the name that the curve has for it
        options = {name: self.defaults.get(name, parameters[name]) for name in names if name != "steps"}
        required = [name for name, default in options.items() if default is Parameter.empty]
        first = dict.fromkeys(["peak", "steps", *required], Parameter.empty)
        return {**first, "warmup_steps": 0, "start": 0.0, **options}


NAMED: dict[str, Named] = {}


def named(name: str, *, has_warmup: bool = False, **defaults: Any) -> Callable[[Build], Build]:
    """Return a decorator for the function with which `get_schedule` builds `name`. Other arguments: see `Named`."""

    def register(build: Build) -> Build:
        NAMED[name] = Named(build, defaults, has_warmup)
        return build

    return register


@named("constant", has_warmup=True)
def constant(value: float, *, steps: float | None = None) -> Schedule:
    """Return `value` at every step. With `steps` it has an end, so that another schedule can follow it in `join`.

    >>> constant(3e-4)(0), constant(3e-4)(10**9)
    (0.0003, 0.0003)
    """
    return Constant(value=value, steps=steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ramp(Timed):
    """From one value to another along a named shape; see `ramp`."""

    kind: ClassVar[str] = "ramp"
    start: float
    end: float
    steps: float
    shape: str = "linear"
    power: float | None = None  # of the remaining share of the way, which falls from 1 to 0; None: 1
    name: InitVar[str] = "ramp"  # of the function that was called, for errors

    def __post_init__(self, name: str) -> None:
        check_number(name, start=self.start, end=self.end)
        check_number(name, above=0, steps=self.steps)
        check_optional(name, above=0, power=self.power)
        if self.shape == "log":
            check_number(name, low=2, steps=self.steps)
        elif self.shape not in SHAPES:
            raise ScheduleError(f"ramp: {unknown_name('shape', self.shape, (*SHAPES, 'log'))}")

    def array_at(self, step: Any, xp: Any) -> Any:
        if self.shape == "log":
            left = 1.0 - xp.log(xp.minimum(step + 1.0, self.steps)) / math.log(self.steps)
        else:
            left = SHAPES[self.shape](xp.minimum(step / self.steps, 1.0), xp)
        if self.power is not None:
            left = left**self.power
        return self.end + left * (self.start - self.end)


def ramp(start: float, end: float, *, steps: float, shape: str = "linear") -> Schedule:
    """Go from `start` at step 0 to `end` at `steps`: end + f(n / steps) · (start - end), with f from `shapes.SHAPES`.

    The shape "log" is DeepSpeed's warmup, start + log(n + 1) / log(steps) · (end - start), at `end` one step earlier.

    >>> ramp(1.0, 0.0, steps=100, shape="minus_sqrt").values([0, 25, 100, 101])
    [1.0, 0.5, 0.0, 0.0]
    """
    return Ramp(start=start, end=end, steps=steps, shape=shape)


@named("linear", has_warmup=True, end=0.0)
def linear(start: float, end: float, *, steps: float) -> Schedule:
    """Follow a straight line.

    >>> linear(1.0, 0.0, steps=100).values([0, 25, 100, 101])
    [1.0, 0.75, 0.0, 0.0]
    """
    return Ramp(start=start, end=end, steps=steps, shape="linear", name="linear")


@named("cosine", has_warmup=True, end=0.0)
def cosine(start: float, end: float, *, steps: float) -> Schedule:
    """Follow half a cosine wave (https://arxiv.org/abs/1608.03983, equation 5). It does not rise again past its end.

    >>> cosine(1.0, 0.0, steps=100).values([0, 50, 100, 150])
    [1.0, 0.5, 0.0, 0.0]
    """
    return Ramp(start=start, end=end, steps=steps, shape="cosine", name="cosine")


@named("minus_sqrt", has_warmup=True, end=0.0)
def minus_sqrt(start: float, end: float, *, steps: float) -> Schedule:
    """Follow 1 - √r, the anneal that https://arxiv.org/abs/2405.18392 found best after a constant phase.

    >>> minus_sqrt(1.0, 0.0, steps=100).values([0, 25, 100])
    [1.0, 0.5, 0.0]
    """
    return Ramp(start=start, end=end, steps=steps, shape="minus_sqrt", name="minus_sqrt")


@named("minus_square", has_warmup=True, end=0.0)
def minus_square(start: float, end: float, *, steps: float) -> Schedule:
    """Follow 1 - r², slow at first."""
    return ramp(start, end, steps=steps, shape="minus_square")


@named("shifted_exponential", has_warmup=True, end=0.0)
def shifted_exponential(start: float, end: float, *, steps: float) -> Schedule:
    """Follow 2 · 2^-r - 1, Megatron-Core's "exponential" anneal, shifted so that it can reach any `end`, 0 included.

    >>> [round(v, 6) for v in shifted_exponential(1.0, 0.0, steps=100).values([0, 50, 100])]
    [1.0, 0.414214, 0.0]
    """
    return Ramp(start=start, end=end, steps=steps, shape="exponential", name="shifted_exponential")


@named("polynomial", has_warmup=True, end=0.0)
def polynomial(start: float, end: float, *, steps: float, power: float = 1.0) -> Schedule:
    """Follow end + (1 - r)^power · (start - end); power 1 is a line, larger powers fall faster at first.

    >>> polynomial(1.0, 0.0, steps=100, power=2).values([0, 50, 100])
    [1.0, 0.25, 0.0]
    """
    check_number("polynomial", above=0, power=power)
    return Ramp(start=start, end=end, steps=steps, power=power, name="polynomial")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exponential(Timed):
    """From one value to another by the same factor at every step; see `exponential`."""

    kind: ClassVar[str] = "exponential"
    start: float
    end: float
    steps: float

    def __post_init__(self) -> None:
        check_number("exponential", above=0, start=self.start, end=self.end, steps=self.steps)

    def array_at(self, step: Any, xp: Any) -> Any:
        value = self.start * (self.end / self.start) ** xp.minimum(step / self.steps, 1.0)
        return xp.where(step >= self.steps, self.end, value)  # the power may miss the end by a rounding


@named("exponential", has_warmup=True)
def exponential(start: float, end: float, *, steps: float) -> Schedule:
    """Follow a true exponential, start · (end / start)^r. Both values must be more than 0.

    >>> [round(v, 6) for v in exponential(1.0, 0.01, steps=100).values([0, 50, 100])]
    [1.0, 0.1, 0.01]
    """
    return Exponential(start=start, end=end, steps=steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Power(Timed):
    """A power law of the step; see `power`."""

    kind: ClassVar[str] = "power"
    start: float
    exponent: float
    timescale: float
    steps: float | None = None

    def __post_init__(self) -> None:
        check_number("power", start=self.start, exponent=self.exponent)
        check_number("power", above=0, timescale=self.timescale)
        check_optional("power", above=0, steps=self.steps)

    def array_at(self, step: Any, xp: Any) -> Any:
        if self.steps is not None:
            step = xp.minimum(step, exact(self.steps))
        return self.start * (1.0 + step / self.timescale) ** self.exponent


def power(start: float, *, exponent: float, timescale: float, steps: float | None = None) -> Schedule:
    """Follow start · (1 + n / timescale)^exponent: a power law of the step, as in https://arxiv.org/abs/2408.13359.

    It ends at `steps` and keeps its value there; without `steps` it has no end.

    >>> power(1.0, exponent=-1.0, timescale=10, steps=90).values([0, 10, 90, 91])
    [1.0, 0.5, 0.1, 0.1]
    """
    return Power(start=start, exponent=exponent, timescale=timescale, steps=steps)


@named("inverse_sqrt", has_warmup=True, timescale=None)
def inverse_sqrt(start: float, *, timescale: float, steps: float | None = None) -> Schedule:
    """Follow start · √(timescale / (n + timescale)), the decay of https://arxiv.org/abs/1706.03762, section 5.3.

    After a warmup of `timescale` steps it is start · √(warmup / step).

    >>> inverse_sqrt(1.0, timescale=10).values([0, 30, 150])
    [1.0, 0.5, 0.25]
    """
    return Power(start=start, exponent=-0.5, timescale=timescale, steps=steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class PiecewiseLinear(Schedule):
    """Straight lines between points; see `piecewise_linear`."""

    kind: ClassVar[str] = "piecewise_linear"
    points: tuple[tuple[float, float], ...]  # (step, value), steps ascending from 0

    def __post_init__(self) -> None:
        if not all(isinstance(point, Sequence) and len(point) == 2 for point in self.points):
            raise ScheduleError(f"piecewise_linear: points={self.points!r} must be (step, value) pairs")
        steps = [step for step, _ in self.points]
        for step, value in self.points:
            check_number("piecewise_linear", step=step, value=value)
        if not steps or steps[0] != 0 or any(b <= a for a, b in pairwise(steps)):
            raise ScheduleError(f"piecewise_linear: the steps of points={self.points!r} must ascend from 0")

    def array_at(self, step: Any, xp: Any) -> Any:
        values = xp.full_like(step, self.points[-1][1], dtype=float)
        for (s0, v0), (s1, v1) in reversed([*pairwise(self.points)]):
            done = (step - exact(s0)) / (s1 - s0)
            values = xp.where(step < exact(s1), v0 + done * (v1 - v0), values)
        return values

    @property
    def length(self) -> float:
        return self.points[-1][0]

    @property
    def boundaries(self) -> Steps:
        return tuple(step for step, _ in self.points[1:])


def piecewise_linear(*points: tuple[float, float]) -> Schedule:
    """Draw straight lines between (step, value) points, the first at step 0.

    >>> piecewise_linear((0, 0.0), (10, 1.0), (110, 0.0)).values([0, 5, 10, 60, 200])
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    return PiecewiseLinear(points=points)
