"""The checkpoints of a series that are kept for their metric, as of a validation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from opt_checkpoint.errors import CheckpointValueError

Mode = Literal["min", "max"]


@dataclass(frozen=True, slots=True)
class KeepBest:
    """How many checkpoints to keep for their metric, in addition to the newest ones.

    Args:
        count: how many, at least 1.
        mode: whether a lower metric is better, such as a loss (`"min"`), or a higher one, such as an accuracy
            (`"max"`).

    Raises:
        CheckpointValueError: `count` is below 1, or `mode` is unknown.
    """

    count: int
    mode: Mode

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 1:
            raise CheckpointValueError(f"KeepBest(count={self.count!r}) must be an integer of at least 1")
        if self.mode not in get_args(Mode):
            raise CheckpointValueError(f"KeepBest(mode={self.mode!r}); allowed: {', '.join(get_args(Mode))}")

    def steps(self, metrics: Mapping[int, float]) -> list[int]:
        """Return the steps to keep, the best one first. Of equal metrics, the later step is better. NaN is never kept.

        Args:
            metrics: of all steps that have one, by step.
        """
        sign = 1 if self.mode == "min" else -1
        ranked = sorted((sign * metric, -step) for step, metric in metrics.items() if not math.isnan(metric))
        return [-step for _, step in ranked[: self.count]]


def metric_number(metric: Any) -> float:
    """Return a metric as a float: a number of Python or numpy, or a tensor of one element.

    Raises:
        CheckpointValueError: it is not one real number.
    """
    try:
        if isinstance(metric, str | bytes):
            raise TypeError("text")
        return float(metric)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise CheckpointValueError(f"metric={metric!r:.80} must be one real number; pass float(metric)") from error


def to_details(metric: float) -> float | str:
    """Return a metric as JSON represents it, which has neither NaN nor infinities."""
    return metric if math.isfinite(metric) else str(metric)


def from_details(details: Mapping[str, Any]) -> float | None:
    """Return the metric in the details of a manifest; None if it has none."""
    try:
        return float(details["metric"])
    except (KeyError, TypeError, ValueError):
        return None
