"""The settings of an `OptimizerParamScheduler`, and the learning rate and weight decay that they give each group."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

from .errors import ScheduleError, is_number, refuse, unknown_name
from .groups import Entries
from .schedule import Schedule, Steps
from .shapes import NUMBERS, SHAPES

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
        refuse(list(_not_numbers(self)) or list(_problems(self)), where="OptimizerParamScheduler")
        for field in fields(self):
            if isinstance(value := getattr(self, field.name), float):  # one of NumPy too, which states must not hold
                object.__setattr__(self, field.name, float(value))

    @property
    def bounds(self) -> Bounds:
        """The bounds of a group without overrides."""
        return Bounds(self.max_lr, self.min_lr, self.start_wd, self.end_wd, 1.0)

    @property
    def length(self) -> float:
        return math.inf if self.lr_decay_style == "constant" else self.lr_decay_steps

    @property
    def boundaries(self) -> Steps:
        warmup = self.lr_warmup_steps
        steps = {max(warmup - self._warmup_lead, 0), warmup, self._anneal[0], self.lr_decay_steps}
        return tuple(sorted(step for step in steps if step > 0))

    def array_at(self, step: Any, xp: Any) -> Any:
        return xp.full_like(step, 0.0, dtype=float) + self.lr_formula(step, xp)(self.max_lr, self.min_lr)

    def lr_formula(self, step: Any, xp: Any = NUMBERS) -> Callable[[float, float], Any]:
        """Return the learning rate at `step` as a function of (max_lr, min_lr), which a group may override."""
        warmup = self.lr_warmup_steps
        init = self.init_lr
        after_warmup = self._after_warmup(step, xp)
        if warmup <= 0 or (xp is NUMBERS and step > warmup):
            return after_warmup
        done = xp.minimum(step + self._warmup_lead, warmup)

        def warmed_up(high: float, low: float) -> Any:
            rising = xp.minimum(init + (high - init) * done / warmup, high)
            return xp.where(step <= warmup, rising, after_warmup(high, low))

        return warmed_up

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
        left = SHAPES[str(shape)](xp.minimum(xp.maximum((step - start) / steps, 0.0), 1.0), xp)
        # `low + 1.0 * (high - low)` may round above high.
        return lambda high, low: xp.minimum(low + left * (high - low), high)

    @property
    def _anneal(self) -> tuple[float, float]:
        """The step at which the learning rate begins to fall, and the number of steps over which it falls."""
        if self.lr_decay_style == "WSD" and self.wsd_decay_steps is not None:
            return self.lr_decay_steps - self.wsd_decay_steps, self.wsd_decay_steps
        return self.lr_warmup_steps, self.lr_decay_steps - self.lr_warmup_steps

    @property
    def _warmup_lead(self) -> float:
        """The number of steps by which the warmup runs ahead; with 0, an `init_lr` of 0 wastes the first update."""
        first = self.warmup_first
        if isinstance(first, str):
            return 1.0 if first == "one" else 0.0
        return first

    def wd_formula(self, step: float) -> Callable[[float, float], float]:
        """Return the weight decay at `step`, before `wd_mult`, as a function of (start_wd, end_wd)."""
        if step > self.wd_incr_steps or self.wd_incr_style == "constant":
            return lambda start, end: end
        r = step / self.wd_incr_steps
        done = r if self.wd_incr_style == "linear" else SHAPES["cosine"](1 - r)
        return lambda start, end: min(start + done * (end - start), end)


SETTINGS = tuple(field.name for field in fields(Settings))
CHOICES = {"lr_decay_style": LR_STYLES, "lr_wsd_decay_style": (None, *WSD_STYLES), "wd_incr_style": WD_STYLES}


def _not_numbers(s: Settings) -> Iterator[str]:
    for field in fields(s):
        value = getattr(s, field.name)
        is_unset = value is None and field.default is None
        if is_unset or field.name in (*CHOICES, "warmup_first"):
            continue
        if not is_number(value) or not math.isfinite(value):
            yield f"{field.name}={value!r} must be a finite number"


def bounds_problems(s: Settings, bounds: Bounds) -> Iterator[str]:
    """Yield a sentence for each reason why a group cannot anneal between these bounds, its own or those of `s`."""
    for name, value in bounds._asdict().items():
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
    """One sentence for each invalid setting, once `_not_numbers` has found nothing."""
    if s.init_lr < 0:
        yield f"init_lr={s.init_lr!r} must be a number, at least 0"
    yield from bounds_problems(s, s.bounds)
    if s.lr_warmup_steps < 0:
        yield f"lr_warmup_steps={s.lr_warmup_steps!r} must not be negative; 0 turns warmup off"
    for name in ("lr_warmup_steps", "wsd_decay_steps"):
        steps = getattr(s, name)
        if steps is not None and 0 < steps < 1:
            yield f"{name}={steps!r} is less than a step; for a fraction of the run, pass {steps!r} * lr_decay_steps"
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
        style = getattr(s, name)
        if style not in known:
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


def bounds_of(settings: Settings, group: Entries) -> Bounds:
    """Return the bounds of `group`."""
    return settings.bounds._replace(**_overrides(group))


def _overrides(group: Entries) -> dict[str, float]:
    """The bounds that `group` has of its own; None counts as not set."""
    return {name: group[name] for name in Bounds._fields if group.get(name) is not None}


def group_values(settings: Settings, groups: Sequence[Entries], step: float) -> list[tuple[float, float]]:
    """Return the (learning rate, weight decay) of each group at `step`. The groups are only read.

    Raises:
        ScheduleError: the overrides of a group are invalid together with the settings that it does not override.
    """
    lr_of = settings.lr_formula(step)
    wd_of = settings.wd_formula(step)
    values: list[tuple[float, float]] = []
    previous = None
    for i, group in enumerate(groups):
        overrides = _overrides(group)
        if overrides != previous:  # most groups have the overrides of the group before
            bounds = settings.bounds._replace(**overrides)
            if problem := next(bounds_problems(settings, bounds), None):
                raise ScheduleError(f"group {i} with {overrides or 'no overrides'}: {problem}")
            lr = lr_of(bounds.max_lr, bounds.min_lr)
            weight_decay = wd_of(bounds.start_wd, bounds.end_wd) * bounds.wd_mult
            previous = overrides
        values.append((lr, weight_decay))
    return values


def refuse_foreign(groups: Sequence[Entries]) -> None:
    """Refuse groups with the `lr_scale` of timm, and those in which torch's OneCycleLR has stored its own `max_lr` and
    `min_lr`, which are not overrides.

    OneCycleLR writes all groups in the same way, so the first is checked. Only it puts `initial_lr` strictly between
    the two.

    Raises:
        ScheduleError: says which keys to remove.
    """
    for i, group in enumerate(groups):
        if group.get("lr_scale") not in (None, 1):
            raise ScheduleError(
                f"group {i} has lr_scale={group['lr_scale']!r}, which OptimizerParamScheduler does not read: give the "
                "group max_lr and min_lr in its place, or use FieldScheduler, which multiplies by it"
            )
    if not groups:
        return
    low, initial, high = map(groups[0].get, ("min_lr", "initial_lr", "max_lr"))
    if low is not None and initial is not None and high is not None and low < initial < high:
        raise ScheduleError(
            f"group 0 has max_lr={high!r}, min_lr={low!r} and initial_lr={initial!r}, as torch's OneCycleLR "
            "leaves them: two schedulers would write one lr. To use this one, remove those keys from the groups"
        )
