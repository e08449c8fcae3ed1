"""Steps, samples, tokens and epochs: conversions of amounts and schedules between units and between batch sizes."""

import math
from dataclasses import dataclass, fields
from enum import Enum
from itertools import pairwise

from .compose import followed, join, shift, stretch
from .curves import constant
from .errors import ScheduleError, check_number, check_optional
from .schedule import Schedule, ScheduleLike, as_schedule


class Unit(Enum):
    """What a schedule counts."""

    STEPS = "steps"  # updates of the optimizer
    SAMPLES = "samples"  # sequences or images, over all ranks
    TOKENS = "tokens"
    EPOCHS = "epochs"  # passes over the data set


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The data that one update consumes over all ranks, and the size of the data set.

    `samples_per_epoch` is the number of samples in the data set. A `DataLoader` makes the last batch of an epoch
    smaller, or drops it with `drop_last=True`, so its epoch is a whole number of updates: see `epoch_steps`.

    >>> batch = Batch(samples=256, tokens_per_sample=4096)
    >>> batch.convert(1_000_000_000_000, Unit.TOKENS, to=Unit.SAMPLES)
    244140625.0
    >>> batch.whole_steps(1_000_000_000_000, Unit.TOKENS)
    953675
    >>> batch = Batch(samples=256, samples_per_epoch=50_000)
    >>> batch.epoch_steps(90), batch.epoch_steps(90, drop_last=True)
    (17640, 17550)

    Raises:
        ScheduleError: a size is not positive, or an amount is in tokens or epochs and `tokens_per_sample` or
            `samples_per_epoch` was not given.
    """

    samples: int
    tokens_per_sample: int | None = None
    samples_per_epoch: int | None = None

    def __post_init__(self) -> None:
        check_optional("Batch", above=0, **{field.name: getattr(self, field.name) for field in fields(self)})

    def convert(self, amount: float, unit: Unit, *, to: Unit) -> float:
        """Return `amount` of `unit` in another unit. It is not rounded, so a number of steps may be a fraction."""
        return amount * self._samples_in(unit) / self._samples_in(to)

    def whole_steps(self, amount: float, unit: Unit) -> int:
        """Return the number of updates that consume at least `amount`."""
        return math.ceil(self.convert(amount, unit, to=Unit.STEPS))

    def epoch_steps(self, epochs: int, *, drop_last: bool = False) -> int:
        """Return the number of updates in `epochs` passes of a `DataLoader`, which begins each with a new batch.

        The last batch of a pass is smaller, or left out with `drop_last`. With gradient accumulation, a pass may end
        within an update; use `whole_steps` then.
        """
        full, rest = divmod(self._samples_in(Unit.EPOCHS), self.samples)
        return epochs * int(full + (rest > 0 and not drop_last))

    def in_steps(self, schedule: ScheduleLike, unit: Unit) -> Schedule:
        """Return `schedule`, which counts `unit`, as a schedule that counts updates.

        >>> from opt_scheduler import linear
        >>> Batch(samples=100, samples_per_epoch=1000).in_steps(linear(1.0, 0.0, steps=3), Unit.EPOCHS)(15)
        0.5
        """
        return stretch(schedule, self.convert(1, unit, to=Unit.STEPS))

    def _samples_in(self, unit: Unit) -> float:
        if unit is Unit.STEPS:
            return self.samples
        if unit is Unit.SAMPLES:
            return 1
        needed = "tokens_per_sample" if unit is Unit.TOKENS else "samples_per_epoch"
        size: int | None = getattr(self, needed)
        if size is None:
            raise ScheduleError(f"Batch: {unit.value} can only be converted with {needed}; pass it")
        return 1.0 / size if unit is Unit.TOKENS else size


def rescale_horizon(horizon: float, *, old_batch: float, new_batch: float, done: float = 0.0) -> float:
    """Return the step at which a run ends that changes its batch size at step `done` and sees the same samples.

    >>> rescale_horizon(1000, old_batch=256, new_batch=512, done=200)
    600.0
    """
    check_number("rescale_horizon", above=0, old_batch=old_batch, new_batch=new_batch)
    check_number("rescale_horizon", low=0, done=done)
    return done + max(horizon - done, 0) * old_batch / new_batch


def rescale(schedule: ScheduleLike, *, old_batch: float, new_batch: float, done: float = 0.0) -> Schedule:
    """Return `schedule` for a run that changes its batch size at step `done`: it has the same value at each sample.

    >>> from opt_scheduler import linear
    >>> rescale(linear(1.0, 0.0, steps=1000), old_batch=256, new_batch=512, done=200).values([100, 200, 400, 600])
    [0.9, 0.8, 0.4, 0.0]
    """
    check_number("rescale", above=0, old_batch=old_batch, new_batch=new_batch)
    check_number("rescale", low=0, done=done)
    return followed(schedule, stretch(shift(schedule, -done), old_batch / new_batch), at=done)


def extend(schedule: ScheduleLike, *, at: float, steps: float, stretch_decay: bool = False) -> Schedule:
    """Return `schedule` for a run that decides at step `at` to end at step `steps` instead of at the schedule's end.

    The rest of it is stretched or compressed: it goes on from its present value and ends at the same value as before. A
    schedule with a constant phase, such as WSD, keeps its decay instead: the constant phase becomes longer, and `at` is
    any step of it. With `stretch_decay=True`, the decay of such a schedule is stretched too.

    >>> from opt_scheduler import linear, wsd
    >>> extend(linear(1.0, 0.0, steps=1000), at=500, steps=2500).values([499, 500, 1500, 2500])
    [0.501, 0.5, 0.25, 0.0]
    >>> planned = wsd(1.0, steps=100, warmup_steps=10, decay_steps=20, shape="linear")
    >>> extend(planned, at=60, steps=300).values([5, 80, 280, 290, 300])
    [0.5, 1.0, 1.0, 0.5, 0.0]

    Raises:
        ScheduleError: `schedule` has no end, or `at` is not before it and before `steps`; or it has a constant phase,
            and `at` is not in that phase or `steps` is before the end, without `stretch_decay`.
    """
    given = as_schedule(schedule)
    length = given.length
    check_number("extend", low=0, at=at, steps=steps)
    if not at < min(length, steps) or math.isinf(length):
        raise ScheduleError(f"extend: at={at!r} must be before {steps=} and before the schedule's end, step {length:g}")
    left = shift(given, -at)
    value = given(at)
    phases = pairwise([0.0, *given.boundaries])
    plateaus = [(start, stop) for start, stop in phases if _is_constant(given, start, stop)]
    is_on_plateau = any(start <= at <= stop and given(start) == value for start, stop in plateaus)
    if stretch_decay or not plateaus or steps == length:
        rest = stretch(left, (steps - at) / (length - at))
    elif steps > length and is_on_plateau:
        rest = join(constant(value, steps=steps - length), left)
    else:
        raise ScheduleError(
            f"extend: at={at!r} must be a step of the constant phase, which becomes longer until {steps=}; "
            "stretch_decay=True stretches the decay instead, and cooldown() ends a run early"
        )
    return followed(given, rest, at=at)


def _is_constant(schedule: Schedule, start: float, stop: float) -> bool:
    """Whether a phase between two boundaries has one value, at its start and at irregularly spaced points."""
    # Square roots of primes, so that no periodic schedule has the same value at all of these points.
    shares = (0.0, *(math.sqrt(prime) % 1.0 for prime in (2, 3, 5, 7, 11, 13)))
    return len({schedule(start + share * (stop - start)) for share in shares}) == 1
