"""Spikes: gradient norms and losses far above those of the last steps. Every rank skips such a step.

    limit = mean + sigma * max(deviation, 1 % of |mean|)        of the last `window` values, each capped at its limit

The window holds equal numbers on every rank, in memory of the device: a step reads no number on the host, and a graph
may capture it. Capped values keep one spike from raising the limits of the steps after it, and let the limit rise with
every refusal, so that it follows norms that have grown for good.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

FLOOR = 0.01
"""The deviation counts as at least this share of the mean: equal norms have none, and any change would be a spike."""
SERIES = ("grad_norms", "losses")  # the rows of the tensors of this module


class Spikes:
    """The gradient norms and losses of the last steps, and the limits that follow from them.

    Only finite values enter. A limit needs half a window of values that are not all zero. After half a window of values
    in a row above it, these are a new level, and there is none until a value is below it.
    """

    def __init__(self, sigma: float, window: int, device: torch.device):
        self.sigma = sigma
        self.window = window
        self.least = max(2, window // 2)  # values before there is a limit; values above it after which there is none
        # (series, 1 + window): how many values in a row were above the limit; then the values, the newest last, and NaN
        # where there is none yet.
        self._rows = torch.empty(len(SERIES), 1 + window, dtype=torch.float64, device=device)
        self._next = torch.empty_like(self._rows)  # after the step that was judged last
        self.load_state_dict({})

    def judge_(self, new: Tensor) -> Tensor:
        """Return the limits (series,) of the values of a step, and prepare the window that `append_judged_` adopts.

        The deviation is the unbiased one.
        """
        num_above = self._rows[:, 0]
        values = self._rows[:, 1:]
        num = (~values.isnan()).sum(1)
        mean = values.nansum(1) / num
        squares = (values - mean[:, None]).square().nansum(1)
        deviation = (squares / (num - 1)).sqrt().maximum(FLOOR * mean.abs())
        has_bound = (num >= self.least) & (deviation > 0)
        bounds = torch.where(has_bound, mean + self.sigma * deviation, torch.inf)
        limits = torch.where(num_above < self.least, bounds, torch.inf)
        num_above = torch.where(new > bounds, num_above + 1, 0.0)
        rows = torch.column_stack([num_above, values[:, 1:], new.minimum(limits)])
        self._next.copy_(torch.where(new.isfinite()[:, None], rows, self._rows))
        return limits

    def append_judged_(self, *, unless: Tensor) -> None:
        """Append the values that were judged last, if they are finite, capped at their limits.

        If `unless` is set, a 0-d bool tensor, nothing is appended.
        """
        self._rows.copy_(torch.where(unless, self._rows, self._next))

    def state_dict(self) -> dict[str, Any]:
        """Return for each series its values, oldest first, and how many in a row were above the limit. The host waits
        for them."""
        state = {}
        for name, (num_above, *values) in zip(SERIES, self._rows.tolist(), strict=True):
            state[name] = {"values": list(filter(math.isfinite, values)), "num_above": int(num_above)}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the values, of which the newest that fit are kept; an empty `state` has none.

        Raises:
            ValueError: `state` is not a mapping, or a series is not a list of finite numbers. Nothing has changed.
        """
        if not isinstance(state, Mapping):
            raise ValueError(f"spikes={state!r}; a dict of {' and '.join(SERIES)} is needed")
        rows = []
        for name in SERIES:
            saved = state.get(name) or {}
            try:
                row = [float(number) for number in (saved.get("num_above", 0), *saved.get("values", ()))]
            except (AttributeError, OverflowError, TypeError, ValueError):
                row = [math.nan]
            if row[0] < 0 or not all(map(math.isfinite, row)):
                raise ValueError(f"spikes: {name}={saved!r}; values must be finite numbers, and num_above a count")
            rows.append([row[0], *([math.nan] * self.window + row[1:])[-self.window :]])
        self._rows.copy_(torch.tensor(rows, dtype=torch.float64, device="cpu"))
        self._next.copy_(self._rows)
