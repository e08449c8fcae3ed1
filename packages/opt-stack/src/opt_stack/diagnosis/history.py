"""What detectors share: findings, the numbers of a run as arrays over its records, and where a series changes."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy import ndarray

from opt_stack.diagnosis.tensor_stats import StepStats

Run = Sequence[StepStats]
JUMP = 5.0  # factor over the norms before, from which a norm has jumped
NUM_BEFORE = 20  # records that give the usual norm


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

    def at(self, record: int) -> str:
        """Return `at step 61`, and whether that is the first of a resumed run."""
        stats = self.run[record]
        suffix = ", the first of the resumed run," if stats is self.resumed else ""
        return f"at step {stats.step}{suffix}"

    def since(self, record: int) -> str:
        return f"from step {self.run[record].step} on"


def logs(values: ndarray) -> ndarray:
    """Return the natural logarithms of numbers above 0."""
    found: ndarray = np.log(np.where(values > 0, values, np.nan))
    return found


def shifts(values: ndarray, floor: float) -> Iterator[tuple[int, float]]:
    """Yield each record from which five values are all outside the range of the eight before, by `floor` and half of
    that range, and the difference of the medians."""
    for at in range(8, len(values) - 2):
        before = values[at - 8 : at]
        after = values[at : at + 5]
        room = floor + np.ptp(before) / 2
        is_above = after.min() > before.max() + room
        is_below = after.max() < before.min() - room
        if is_above or is_below:
            size = np.median(after) - np.median(before)
            yield at, float(size)


def change(values: ndarray, at: int) -> ndarray:
    """Return the values at a record, less the median of the three before."""
    before = values[max(at - 3, 0) : at]
    size: ndarray = values[at] - np.median(before, 0)
    return size


def place(name: str) -> str:
    """Return a parameter with its layer."""
    layer, _, _ = name.rpartition(".")
    return f"{name!r} (layer {layer!r})" if layer else repr(name)


def places(names: Sequence[str]) -> str:
    """Return the first of some parameters, and how many there are."""
    others = f", and of {len(names) - 1} other parameters," if len(names) > 1 else ""
    return f"{place(names[0])}{others}"


Sentences = Iterator[tuple[int, str]]  # each with the number of its record
Detector = Callable[[History], Sentences]
