"""What detectors share: findings, the numbers of a run as arrays over its records, and where a series changes."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy import ndarray

from opt_stack.diagnosis.tensor_stats import StepStats

Run = Sequence[StepStats]
JUMP = 5.0  # factor over the norms before, from which a norm has jumped
NUM_BEFORE = 20  # records that give the usual norm


Sentences = Iterator[tuple[int, str]]
"""The numbers of records, and what happened there. `find` puts the step before it."""


class Finding(NamedTuple):
    """Something that changed, in a sentence."""

    record: StepStats | None  # None: after the last one
    text: str


class History:
    """The records of a run, after those of the run that it resumes. Arrays are (records,) or (records, parameters),
    float64, NaN where a number is not known."""

    def __init__(self, run: Run, resumed: StepStats | None = None):
        self.run = run
        self.resumed = resumed  # the first record of the resumed run

    @cached_property
    def names(self) -> list[str]:
        """The parameters that all records have."""
        return [name for name in self.run[-1].params if all(name in stats.params for stats in self.run)]

    def of_params(self, field: str) -> ndarray:
        """Return a field of `TensorStats`, by parameter."""
        rows = [[getattr(stats.params[name], field) for name in self.names] for stats in self.run]
        return np.array(rows, float)

    def of_steps(self, field: str) -> ndarray:
        """Return a field of `StepStats`."""
        return np.array([getattr(stats, field) for stats in self.run], float)

    @cached_property
    def settings(self) -> dict[tuple[str, str], ndarray]:
        """The numbers of groups, by their key and group."""
        found = {}
        for group, numbers in self.run[-1].settings.items():
            for key in numbers:
                values = [stats.settings.get(group, {}).get(key) for stats in self.run]
                found[key, group] = np.array(values, float)
        return found

    @cached_property
    def rates(self) -> dict[str, ndarray]:
        """The learning rates, by group."""
        return {group: values for (key, group), values in self.settings.items() if key == "lr"}

    @cached_property
    def losses(self) -> ndarray:
        return self.of_steps("loss")

    @cached_property
    def grads(self) -> ndarray:
        """The logarithms of gradient norms, by parameter."""
        return logs(self.of_params("grad_norm"))

    @cached_property
    def common_grads(self) -> ndarray:
        """The logarithm of the gradient norm that parameters have in common, their median."""
        is_known = ~np.isnan(self.grads).any(0)
        common: ndarray = np.median(self.grads[:, is_known], 1)
        return common

    def places(self, sizes: ndarray) -> str:
        """Return the parameter that has the largest size, and the number of the others that have one."""
        num_others = np.count_nonzero(sizes) - 1
        others = f", and of {num_others} other parameters," if num_others else ""
        return f"{self.names[abs(sizes).argmax()]!r}{others}"


def logs(values: ndarray) -> ndarray:
    """Return the natural logarithms of numbers above 0."""
    found: ndarray = np.log(np.where(values > 0, values, np.nan))
    return found


def shifts(values: ndarray, floor: float) -> Iterator[tuple[int, ndarray]]:
    """Yield the records from which five values are all outside the range of the eight before, by `floor` and half of
    that range, with the difference of the medians. Of (records,) or (records, n): then 0 for those that are not."""
    for at in range(8, len(values) - 2):
        before = values[at - 8 : at]
        after = values[at : at + 5]
        room = floor + np.ptp(before, 0) / 2
        is_outside = (after.min(0) > before.max(0) + room) | (after.max(0) < before.min(0) - room)
        if is_outside.any():
            yield at, np.where(is_outside, change(values, at, 5), 0.0)


def change(values: ndarray, at: int, num: int = 1) -> ndarray:
    """Return the median of the values of some records, less that of the eight before."""
    size: ndarray = np.median(values[at : at + num], 0) - np.median(values[max(at - 8, 0) : at], 0)
    return size


def last_begun(holds: ndarray) -> int:
    """Return the first record from which something holds in all of them."""
    return int(np.flatnonzero(~holds).max(initial=-1)) + 1
