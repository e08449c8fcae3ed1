"""The settings of an `OptimizerParamScheduler`: validated together, and a schedule of the learning rate."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

from . import shapes
from .errors import is_number, refuse, unknown_name
from .schedule import NUMBERS, Schedule

LR_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_STYLES = ("linear", "cosine", "exponential", "minus_sqrt")  # Megatron-Core's four, a subset of `shapes.SHAPES`
WD_STYLES = ("constant", "linear", "cosine")

WarmupFirst: TypeAlias = Literal["init", "one"] | float


class Bounds(NamedTuple):
    """The bounds between which one group anneals, with its overrides."""

    max_lr: float
    min_lr: float
    start_wd: float
    end_wd: float
    wd_mult: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Schedule):
    """The arguments of Megatron-Core's scheduler. As a `Schedule`, it is the learning rate between these bounds.

    `lr_decay_steps` and `wd_incr_steps` count from step 0, so `lr_decay_steps` contains the warmup. Steps are in the
    unit of `step(increment)`.

    Raises:
        ScheduleError: lists every invalid field, with what is allowed.
    """

    kind: ClassVar[str] = "megatron"
    max_lr: float
    lr_decay_steps: float
    init_lr: float = 0.0
    min_lr: float = 0.0
    lr_warmup_steps: float = 0
    lr_decay_style: str = "linear"
    start_wd: float = 0.0
    end_wd: float = 0.0
    wd_incr_steps: float = 0
    wd_incr_style: str = "constant"
    wsd_decay_steps: float | None = None
    lr_wsd_decay_style: str | None = None
    warmup_first: WarmupFirst = "init"

    def __post_init__(self) -> None:
        problems = _not_numbers(self) or list(_problems(self))
        refuse(problems, where="OptimizerParamScheduler")

    @property
    def length(self) -> float:
        return math.inf if self.lr_decay_style == "constant" else self.lr_decay_steps

    @property
    def boundaries(self) -> tuple[float, ...]:
        warmup = self.lr_warmup_steps
        steps = {max(warmup - self._warmup_lead, 0), warmup, self._anneal[0], self.lr_decay_steps}
        return tuple(sorted(step for step in steps if step > 0))

    def array_at(self, step: Any, xp: Any) -> Any:
        return xp.full_like(step, 0.0, dtype=float) + self.lr_formula(step, xp)(self.max_lr, self.min_lr)

    def lr_formula(self, step: Any, xp: Any = NUMBERS) -> Callable[[float, float], Any]:
        """Return the learning rate at `step` as a function of (max_lr, min_lr), which a group may override."""
        warmup = self.lr_warmup_steps
        init = self.init_lr
        decayed = self._after_warmup(step, xp)
        if warmup <= 0 or (xp is NUMBERS and step > warmup):
            return decayed
        done = xp.minimum(step + self._warmup_lead, warmup)
        return lambda high, low: xp.where(
            step <= warmup, xp.minimum(init + (high - init) * done / warmup, high), decayed(high, low)
        )

    def _after_warmup(self, step: Any, xp: Any) -> Callable[[float, float], Any]:
        if self.lr_decay_style == "constant":
            return lambda high, low: high
        if self.lr_decay_style == "inverse-square-root":
            # Megatron-Core drops to min_lr after the last step, however far that is; here the last value is kept.
            root_peak = math.sqrt(max(self.lr_warmup_steps, 1))
            root_step = xp.sqrt(xp.maximum(xp.minimum(step, self.lr_decay_steps), 1))
            return lambda high, low: xp.maximum(low, high * root_peak / root_step)
        start, steps = self._anneal
        shape = self.lr_wsd_decay_style if self.lr_decay_style == "WSD" else self.lr_decay_style
        left = shapes.SHAPES[str(shape)](xp.minimum(xp.maximum((step - start) / steps, 0.0), 1.0), xp)
        # `low + 1.0 * (high - low)` may round above high.
        return lambda high, low: xp.minimum(low + left * (high - low), high)

    @property
    def _anneal(self) -> tuple[float, float]:
        """The step at which the learning rate begins to fall, and over how many steps it does."""
        if self.lr_decay_style == "WSD" and self.wsd_decay_steps is not None:
            return self.lr_decay_steps - self.wsd_decay_steps, self.wsd_decay_steps
        return self.lr_warmup_steps, self.lr_decay_steps - self.lr_warmup_steps

    @property
    def _warmup_lead(self) -> float:
        """The number of steps by which the warmup runs ahead; with 0, an `init_lr` of 0 wastes the first update."""
        first = self.warmup_first
        return {"init": 0.0, "one": 1.0}[first] if isinstance(first, str) else first

    def wd_formula(self, step: float) -> Callable[[float, float], float]:
        """Return the weight decay at `step`, before `wd_mult`, as a function of (start_wd, end_wd)."""
        if step > self.wd_incr_steps or self.wd_incr_style == "constant":
            return lambda start, end: end
        r = step / self.wd_incr_steps
        done = r if self.wd_incr_style == "linear" else 0.5 * (math.cos(math.pi * (1 - r)) + 1.0)
        return lambda start, end: min(start + done * (end - start), end)


CHOICES = {"lr_decay_style": LR_STYLES, "lr_wsd_decay_style": (None, *WSD_STYLES), "wd_incr_style": WD_STYLES}


def _not_numbers(s: Settings) -> list[str]:
    names = [field.name for field in fields(s) if field.name not in (*CHOICES, "warmup_first")]
    given = {name: getattr(s, name) for name in names if name != "wsd_decay_steps" or s.wsd_decay_steps is not None}
    wrong = {name: value for name, value in given.items() if not is_number(value) or not math.isfinite(value)}
    return [f"{name}={value!r} must be a finite number" for name, value in wrong.items()]


def bounds_problems(s: Settings, bounds: Bounds) -> Iterator[str]:
    """One sentence for each reason why a group cannot anneal between these bounds, which it overrides or takes."""
    given: Mapping[str, Any] = bounds._asdict()
    for name, value in given.items():
        if isinstance(value, str) or not value >= 0:
            yield f"{name}={value!r} must be a number, at least 0"
            return
    high, low, start, end, _ = bounds
    if low > high:
        yield f"max_lr={high!r} must be at least min_lr={low!r}"
    if s.init_lr > high:
        yield f"max_lr={high!r} must be at least init_lr={s.init_lr!r}, at which the warmup of every group begins"
    if start > end:
        yield (
            f"end_wd={end!r} must be at least start_wd={start!r}; for a falling weight decay use "
            "FieldScheduler(optimizer, {'lr': ..., 'weight_decay': ...})"
        )
    elif s.wd_incr_style == "constant" and start != end:
        yield f"wd_incr_style='constant' needs start_wd={start!r} equal to end_wd={end!r}"


def _problems(s: Settings) -> Iterator[str]:
    """One sentence for each setting that is invalid, if all numbers are numbers."""
    if s.init_lr < 0:
        yield f"init_lr={s.init_lr!r} must be a number, at least 0"
    yield from bounds_problems(s, Bounds(s.max_lr, s.min_lr, s.start_wd, s.end_wd, 1.0))
    if s.lr_warmup_steps < 0:
        yield f"lr_warmup_steps={s.lr_warmup_steps!r} must not be negative; 0 turns warmup off"
    for name in ("lr_warmup_steps", "wsd_decay_steps"):
        if 0 < (steps := getattr(s, name) or 0) < 1:
            yield (f"{name}={steps!r} is less than a step; for a fraction of the run, pass {steps!r} * lr_decay_steps")
    if s.lr_decay_steps <= 0:
        yield f"lr_decay_steps={s.lr_decay_steps!r} must be positive"
    elif s.lr_warmup_steps >= s.lr_decay_steps:
        yield (
            f"lr_warmup_steps={s.lr_warmup_steps!r} must be less than lr_decay_steps={s.lr_decay_steps!r}, "
            "which counts from step 0 and contains the warmup"
        )
    first = s.warmup_first
    if first not in ("init", "one") and (isinstance(first, str) or not 0 < first < math.inf):
        yield f"warmup_first={first!r} must be 'init', 'one' or a positive number, the size of an increment"
    for name, known in CHOICES.items():
        if (style := getattr(s, name)) not in known:
            yield unknown_name(name, style, filter(None, known))
    if s.lr_decay_style == "WSD":  # launchers pass the WSD fields with every style
        yield from _wsd_problems(s)
    if s.wd_incr_style != "constant" and s.wd_incr_steps <= 0:
        yield f"wd_incr_steps={s.wd_incr_steps!r} must be positive for wd_incr_style={s.wd_incr_style!r}"


def _wsd_problems(s: Settings) -> Iterator[str]:
    if s.lr_wsd_decay_style is None:
        yield f"lr_wsd_decay_style=None, but 'WSD' needs one of {', '.join(map(repr, WSD_STYLES))}"
    room = s.lr_decay_steps - s.lr_warmup_steps
    if s.wsd_decay_steps is None:
        yield "wsd_decay_steps=None, but 'WSD' needs the length of its anneal"
    elif s.wsd_decay_steps <= 0:
        yield f"wsd_decay_steps={s.wsd_decay_steps!r} must be positive; without an anneal, use 'constant'"
    elif s.wsd_decay_steps > room:
        yield (
            f"wsd_decay_steps={s.wsd_decay_steps!r} must fit between the warmup and the end: "
            f"lr_decay_steps - lr_warmup_steps = {room!r}"
        )
