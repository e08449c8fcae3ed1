"""The settings of an `OptimizerParamScheduler`, validated together, and its numbers as pure functions of the step."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from . import shapes
from .errors import refuse, unknown_name
from .schedule import is_number

LR_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_STYLES = ("linear", "cosine", "exponential", "minus_sqrt")  # Megatron-Core's four, a subset of `shapes.SHAPES`
WD_STYLES = ("constant", "linear", "cosine")

WarmupFirst: TypeAlias = Literal["init", "one"] | float
TwoToOne: TypeAlias = Callable[[float, float], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The arguments of Megatron-Core's scheduler. Steps, which may be fractions, are in the unit of `step(increment)`.

    `lr_decay_steps` and `wd_incr_steps` count from step 0, so `lr_decay_steps` contains the warmup.

    Raises:
        ScheduleError: lists every invalid field, with what is allowed.
    """

    init_lr: float
    max_lr: float
    min_lr: float
    lr_warmup_steps: float
    lr_decay_steps: float
    lr_decay_style: str
    start_wd: float
    end_wd: float
    wd_incr_steps: float
    wd_incr_style: str
    wsd_decay_steps: float | None = None
    lr_wsd_decay_style: str | None = None
    warmup_first: WarmupFirst = "init"

    def __post_init__(self) -> None:
        problems = _not_numbers(self) or list(_problems(self))
        refuse(problems, where="OptimizerParamScheduler")

    @property
    def warmup_lead(self) -> float:
        """The number of steps by which the warmup runs ahead; with 0, an `init_lr` of 0 wastes the first update."""
        if self.warmup_first == "init":
            return 0.0
        return 1.0 if isinstance(self.warmup_first, str) else self.warmup_first

    def lr_formula(self, step: float) -> TwoToOne:
        """Return the learning rate at `step` as a function of (max_lr, min_lr), which a group may override."""
        warmup, init = self.lr_warmup_steps, self.init_lr
        if warmup > 0 and step <= warmup:
            done = float(min(step + self.warmup_lead, warmup))
            return lambda high, low: min(init + (high - init) * done / warmup, high)
        if self.lr_decay_style == "constant":
            return lambda high, low: high
        if self.lr_decay_style == "inverse-square-root":
            return self._inverse_sqrt(step)
        if step > self.lr_decay_steps:
            return lambda high, low: low
        left = self.lr_left(step)
        # `low + 1.0 * (high - low)` may round above high.
        return lambda high, low: min(low + left * (high - low), high)

    def lr_left(self, step: float) -> float:
        """Fraction in [0, 1] of `max_lr - min_lr` left at a step between warmup and end; linear, cosine and WSD."""
        if self.lr_decay_style != "WSD":
            r = (step - self.lr_warmup_steps) / (self.lr_decay_steps - self.lr_warmup_steps)
            return shapes.SHAPES[self.lr_decay_style](min(r, 1.0))
        assert self.wsd_decay_steps is not None  # as validated
        assert self.lr_wsd_decay_style is not None
        anneal_start = self.lr_decay_steps - self.wsd_decay_steps
        if step <= anneal_start:
            return 1.0
        # Fractional steps: `anneal_start` is rounded, so the last step may lie beyond its length from there.
        return shapes.SHAPES[self.lr_wsd_decay_style](min((step - anneal_start) / self.wsd_decay_steps, 1.0))

    def _inverse_sqrt(self, step: float) -> TwoToOne:
        # Megatron-Core drops to min_lr after the last step, however far that is; here the last value is kept.
        root_peak = math.sqrt(max(self.lr_warmup_steps, 1))
        root_step = math.sqrt(max(min(step, self.lr_decay_steps), 1))
        return lambda high, low: max(low, high * root_peak / root_step)

    def wd_formula(self, step: float) -> TwoToOne:
        """Return the weight decay at `step`, before `wd_mult`, as a function of (start_wd, end_wd)."""
        if step > self.wd_incr_steps or self.wd_incr_style == "constant":
            return lambda start, end: end
        r = step / self.wd_incr_steps
        done = r if self.wd_incr_style == "linear" else 0.5 * (math.cos(math.pi * (1 - r)) + 1.0)
        return lambda start, end: min(start + done * (end - start), end)


_NUMBERS = (
    "init_lr", "max_lr", "min_lr", "lr_warmup_steps", "lr_decay_steps",
    "start_wd", "end_wd", "wd_incr_steps", "wsd_decay_steps",
)  # fmt: skip


def _not_numbers(s: Settings) -> list[str]:
    given = {name: getattr(s, name) for name in _NUMBERS if name != "wsd_decay_steps" or s.wsd_decay_steps is not None}
    return [
        f"{name}={value!r} must be a finite number"
        for name, value in given.items()
        if not is_number(value) or not math.isfinite(value)
    ]


def _problems(s: Settings) -> Iterator[str]:
    """One sentence for each setting that is invalid, if all of `_NUMBERS` are numbers."""
    for name in ("init_lr", "min_lr"):
        if getattr(s, name) < 0:
            yield f"{name}={getattr(s, name)!r} must not be negative"
    if s.max_lr < s.min_lr:
        yield f"max_lr={s.max_lr!r} must be at least min_lr={s.min_lr!r}"
    if s.init_lr > s.max_lr:
        yield f"init_lr={s.init_lr!r} must be at most max_lr={s.max_lr!r}: warmup rises from one to the other"
    if s.lr_warmup_steps < 0:
        yield f"lr_warmup_steps={s.lr_warmup_steps!r} must not be negative; 0 turns warmup off"
    if s.lr_decay_steps <= 0:
        yield f"lr_decay_steps={s.lr_decay_steps!r} must be positive"
    elif s.lr_warmup_steps >= s.lr_decay_steps:
        yield (
            f"lr_warmup_steps={s.lr_warmup_steps!r} must be less than lr_decay_steps={s.lr_decay_steps!r}, "
            "which counts from step 0 and contains the warmup"
        )
    if s.lr_decay_style not in LR_STYLES:
        yield unknown_name("lr_decay_style", s.lr_decay_style, LR_STYLES)
    first = s.warmup_first
    if first not in ("init", "one") and (isinstance(first, str) or not 0 < first < math.inf):
        yield f"warmup_first={first!r} must be 'init', 'one' or a positive number, the size of an increment"
    if s.lr_wsd_decay_style is not None and s.lr_wsd_decay_style not in WSD_STYLES:
        yield unknown_name("lr_wsd_decay_style", s.lr_wsd_decay_style, WSD_STYLES)
    if s.lr_decay_style == "WSD":  # launchers pass the WSD fields with every style
        yield from _wsd_problems(s)
    yield from _wd_problems(s)


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


def _wd_problems(s: Settings) -> Iterator[str]:
    if s.start_wd < 0:
        yield f"start_wd={s.start_wd!r} must not be negative"
    if s.end_wd < s.start_wd:
        yield (
            f"end_wd={s.end_wd!r} must be at least start_wd={s.start_wd!r}; "
            "for a falling weight decay pass schedules=[FieldSchedule(field='weight_decay', ...)]"
        )
    if s.wd_incr_style not in WD_STYLES:
        yield unknown_name("wd_incr_style", s.wd_incr_style, WD_STYLES)
    elif s.wd_incr_style != "constant" and s.wd_incr_steps <= 0:
        yield f"wd_incr_steps={s.wd_incr_steps!r} must be positive for wd_incr_style={s.wd_incr_style!r}"
    elif s.wd_incr_style == "constant" and s.start_wd != s.end_wd:
        yield f"wd_incr_style='constant' needs start_wd={s.start_wd!r} equal to end_wd={s.end_wd!r}"
    if s.wd_incr_style == "constant" and s.wd_incr_steps < 0:
        yield f"wd_incr_steps={s.wd_incr_steps!r} must not be negative"
