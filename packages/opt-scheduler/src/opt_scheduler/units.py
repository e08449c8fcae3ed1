"""Steps, samples and tokens: converting amounts, and schedules, between them and between batch sizes."""

import math
from dataclasses import dataclass
from enum import Enum

from .compose import cut, join, shift, stretch
from .errors import ScheduleError
from .schedule import Schedule, ScheduleLike, check_number


class Unit(Enum):
    """What a schedule counts."""

    STEPS = "steps"  # updates of the optimizer
    SAMPLES = "samples"  # sequences or images, over all ranks
    TOKENS = "tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one update consumes over all ranks: so many samples, of so many tokens each.

    >>> batch = Batch(samples=256, tokens_per_sample=4096)
    >>> batch.convert(1_000_000_000_000, Unit.TOKENS, to=Unit.SAMPLES)
    244140625.0
    >>> batch.whole_steps(1_000_000_000_000, Unit.TOKENS)
    953675

    Raises:
        ScheduleError: sizes that are not positive; an amount in tokens where `tokens_per_sample` is not given.
    """

    samples: int
    tokens_per_sample: int | None = None

    def __post_init__(self) -> None:
        check_number("Batch", above=0, samples=self.samples, tokens_per_sample=self.tokens_per_sample)

    def convert(self, amount: float, unit: Unit, *, to: Unit) -> float:
        """`amount` of `unit` in another unit; exact, so a number of steps may be a fraction."""
        return amount * self._samples_in(unit) / self._samples_in(to)

    def whole_steps(self, amount: float, unit: Unit) -> int:
        """The updates needed for `amount`, rounded up: never less data than was asked for."""
        return math.ceil(self.convert(amount, unit, to=Unit.STEPS))

    def _samples_in(self, unit: Unit) -> float:
        if unit is Unit.SAMPLES:
            return 1.0
        if unit is Unit.STEPS:
            return self.samples
        if self.tokens_per_sample is None:
            raise ScheduleError("Batch: tokens_per_sample is not given, so tokens cannot be converted; give it")
        return 1.0 / self.tokens_per_sample


def rescale_horizon(horizon: float, *, old_batch: float, new_batch: float, done: float = 0.0) -> float:
    """The step at which a run ends that changes its batch size at step `done`, if it is to see the same samples.

    >>> rescale_horizon(1000, old_batch=256, new_batch=512, done=200)
    600.0
    """
    check_number("rescale_horizon", above=0, old_batch=old_batch, new_batch=new_batch)
    check_number("rescale_horizon", low=0, done=done)
    return done + max(horizon - done, 0) * old_batch / new_batch


def rescale(schedule: ScheduleLike, *, old_batch: float, new_batch: float, done: float = 0.0) -> Schedule:
    """`schedule`, in steps, for a run that changes its batch size at step `done`: the same value at the same sample.

    >>> from opt_scheduler import linear
    >>> rescale(linear(1.0, 0.0, steps=1000), old_batch=256, new_batch=512, done=200).values([100, 200, 400, 600])
    [0.9, 0.8, 0.4, 0.0]
    """
    check_number("rescale", above=0, old_batch=old_batch, new_batch=new_batch)
    check_number("rescale", low=0, done=done)
    rest = stretch(shift(schedule, -done), old_batch / new_batch)
    return join(cut(schedule, done), rest) if done > 0 else rest
