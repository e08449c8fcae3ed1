"""A reactive schedule: the learning rate falls when a metric stops improving."""

import logging
import math
from collections.abc import Sequence

from .errors import ScheduleError, check_number, check_optional, unknown_name
from .groups import VERSION, Entries, Group, GroupScheduler, check_state, set_
from .schedule import Plain

logger = logging.getLogger("opt_scheduler")

_MODES = ("min", "max")
_SETTINGS = ("factor", "patience", "threshold", "mode", "cooldown", "min_scale")
_STATE = ("scale", "best", "num_bad", "cooldown_left")


class Plateau(GroupScheduler):
    """Multiplies the learning rates that `scheduler` writes by a factor that falls when a metric stops improving.

    Schedules are pure functions of the step, so a reaction to a metric needs this wrapper, which has a state. Step the
    wrapper in place of `scheduler`, and call `observe(metric)` after each evaluation. For torch's `ReduceLROnPlateau`
    alone, wrap `FieldScheduler(optimizer, 1.0, relative=True)`.

    A metric is an improvement if it is below `best · (1 - threshold)`, or above `best · (1 + threshold)` with
    `mode="max"`; for a negative `best` the margin is `threshold · |best|` as well. After more than `patience`
    observations in a row without one, the factor is multiplied by `factor`, down to `min_scale`, and the next
    `cooldown` observations are not counted. A NaN is not an improvement.

    On several ranks, `observe` must receive the same number on all of them: reduce the metric over the ranks first.
    Otherwise the ranks train with different learning rates, and nothing here can detect it.

    >>> from types import SimpleNamespace
    >>> from opt_scheduler import FieldScheduler, constant
    >>> optimizer = SimpleNamespace(param_groups=[{"lr": 0.0}])
    >>> scheduler = Plateau(FieldScheduler(optimizer, constant(0.5)), factor=0.1, patience=1)
    >>> for loss in (3.0, 2.0, 2.0, 2.0):
    ...     scheduler.step()
    ...     reduced = scheduler.observe(loss)
    >>> reduced, optimizer.param_groups[0]["lr"]
    (True, 0.05)

    Raises:
        ScheduleError: `scheduler` is not a scheduler of this package or is a `Plateau` itself, or a setting is not in
            its range.
    """

    def __init__(
        self,
        scheduler: GroupScheduler,
        *,
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        mode: str = "min",
        cooldown: int = 0,
        min_scale: float = 0.0,
    ) -> None:
        if not isinstance(scheduler, GroupScheduler) or isinstance(scheduler, Plateau):
            raise ScheduleError(
                f"Plateau: scheduler={scheduler!r} must be a FieldScheduler or an OptimizerParamScheduler; for a "
                "schedule, use Plateau(FieldScheduler(optimizer, schedule))"
            )
        check_number("Plateau", above=0, factor=factor)
        check_number("Plateau", low=0, patience=patience, threshold=threshold, cooldown=cooldown, min_scale=min_scale)
        if factor >= 1 or min_scale > 1:
            raise ScheduleError(
                f"Plateau: factor={factor!r} must be less than 1, and min_scale={min_scale!r} at most 1"
            )
        if mode not in _MODES:
            raise ScheduleError(f"Plateau: {unknown_name('mode', mode, _MODES)}")
        super().__init__(scheduler.optimizer)
        if not any(map(scheduler.writes_lr, self.param_groups)):
            raise ScheduleError("Plateau: the scheduler sets the learning rate of no group; add a schedule for 'lr'")
        self.scheduler = scheduler
        self.num_steps = scheduler.num_steps
        self.factor = factor
        self.patience = patience
        self.threshold = threshold
        self.mode = mode
        self.cooldown = cooldown
        self.min_scale = min_scale
        self.scale = 1.0
        self.best: float | None = None
        self.num_bad = 0
        self.cooldown_left = 0

    def observe(self, metric: float) -> bool:
        """Record one value of the metric; return whether it lowered the learning rates, which takes effect at once.

        Raises:
            ScheduleError: `metric` is neither a number nor a tensor with one, or the scheduler inside was stepped.
        """
        try:
            value = float(metric)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ScheduleError(f"Plateau: metric={metric!r} must be one number") from error
        self._check_inner_step()
        if self._improves(value):
            self.best = value
            self.num_bad = 0
        else:
            self.num_bad += 1
        if self.cooldown_left > 0:
            self.cooldown_left -= 1
            self.num_bad = 0
        if self.num_bad <= self.patience:
            return False
        self.num_bad = 0
        self.cooldown_left = self.cooldown
        lowered = max(self.scale * self.factor, self.min_scale)
        if lowered == self.scale:
            return False
        self.scale = lowered
        self.seek(self.num_steps)
        return True

    def _improves(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        if self.best is None:
            return True
        margin = self.threshold * abs(self.best)
        return value < self.best - margin if self.mode == "min" else value > self.best + margin

    def _write(self, groups: Sequence[Group], num_steps: float) -> None:
        self._check_inner_step()
        self.scheduler.seek(num_steps)
        self._scale_(groups)

    def _check_inner_step(self) -> None:
        if self.scheduler.num_steps != self.num_steps:
            raise ScheduleError(
                f"Plateau: the scheduler inside is at step {self.scheduler.num_steps:g}, this one at "
                f"{self.num_steps:g}; step only this one, which steps the other"
            )

    def _scale_(self, groups: Sequence[Group]) -> None:
        """Multiply the learning rates that the scheduler inside has just written."""
        filled: set[int] = set()
        for group in groups:
            if self.scheduler.writes_lr(group):
                set_(group, "lr", float(group["lr"]) * self.scale, filled)

    def _base_lr(self, place: int, group: Group) -> float:
        return self.scheduler._base_lr(place, group)

    def writes_lr(self, group: Group) -> bool:
        return self.scheduler.writes_lr(group)

    def state_dict(self) -> Plain:
        """Return the factor and the counts, and the state of the scheduler inside, in plain types."""
        counts = {name: getattr(self, name) for name in _STATE}
        settings = {name: getattr(self, name) for name in _SETTINGS}
        return {"version": VERSION, "settings": settings, **counts, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state_dict: Entries) -> None:
        """Set the factor, the counts and the scheduler inside, and write the groups.

        The settings stay those of this object; a warning names each one that changed.

        Raises:
            ScheduleError: not a state of a `Plateau`, one of a newer version, or one that the scheduler inside refuses.
                Nothing has changed then.
        """
        check_state("Plateau", state_dict, (*_STATE, "scheduler"))
        counts = {name: state_dict[name] for name in _STATE}
        check_number("Plateau", low=0, **{name: counts[name] for name in _STATE if name != "best"})
        check_optional("Plateau", best=counts["best"])
        self.scheduler.load_state_dict(state_dict["scheduler"])
        for name, value in counts.items():
            setattr(self, name, value)
        self.num_steps = self.scheduler.num_steps
        self._scale_(self.param_groups)
        for name, saved in state_dict.get("settings", {}).items():
            if name in _SETTINGS and (value := getattr(self, name)) != saved:
                logger.warning("Plateau: %s=%r here, and %r in the checkpoint", name, value, saved)
