"""Spikes: gradient norms and losses far above those of the last steps. Every rank refuses such a step.

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


class NotedLosses:
    """The sum and the number of the losses that this rank has noted since its last step, on the device."""

    def __init__(self, device: torch.device):
        with torch.inference_mode(False):  # a step outside of inference mode must be able to write them, too
            self._sums = torch.zeros(2, dtype=torch.float64, device=device)

    @torch.no_grad()
    def note(self, loss: Tensor | float) -> None:
        """Add a loss, one element. The host waits for nothing, unless the loss is on another device."""
        if isinstance(loss, Tensor):
            value = loss.detach().reshape(()).to(self._sums.device, torch.float64)
            self._sums[0] += value
        else:
            self._sums[0] += float(loss)
        self._sums[1] += 1

    def take_(self) -> Tensor:
        """Return sum and number (2,), float64, and begin anew."""
        taken = self._sums.clone()
        self._sums.zero_()
        return taken


class Spikes:
    """The gradient norms and losses of the last steps, and the limits that follow from them.

    Only finite values enter. A limit needs half a window of values that are not all zero. It is lifted after half a
    window of values in a row above it, which are a new level.
    """

    def __init__(self, sigma: float, window: int, device: torch.device):
        self.sigma = sigma
        self.window = window
        self.least = max(2, window // 2)  # values before there is a limit; refusals in a row after which there is none
        with torch.inference_mode(False):  # a step outside of inference mode must be able to write them, too
            # (series, window), the newest value last; NaN where there is none yet.
            self._values = torch.full((len(SERIES), window), math.nan, dtype=torch.float64, device=device)
            # (series,): values in a row above the limit
            self._num_above = torch.zeros(len(SERIES), dtype=torch.float64, device=device)

    def bounds(self) -> Tensor:
        """Return mean + sigma * deviation (series,), float64; infinite while there are too few values, or only zeros.
        The deviation is the unbiased one."""
        values = self._values
        num = (~values.isnan()).sum(1)
        mean = values.nansum(1) / num
        squares = (values - mean[:, None]).square().nansum(1)
        deviation = (squares / (num - 1)).sqrt().maximum(FLOOR * mean.abs())
        has_bound = (num >= self.least) & (deviation > 0)
        return torch.where(has_bound, mean + self.sigma * deviation, torch.inf)

    def limits(self, bounds: Tensor) -> Tensor:
        """Return the limits of the next values (series,): `bounds`, or infinity where a level has stayed above them."""
        return torch.where(self._num_above < self.least, bounds, torch.inf)

    def enter_(self, values: Tensor, bounds: Tensor, *, unless: Tensor | None = None) -> None:
        """Append the finite ones of `values` (series,), capped at the limits that follow from `bounds`. If `unless` is
        set, a 0-d bool tensor, nothing changes."""
        enters = values.isfinite()
        if unless is not None:
            enters &= ~unless
        capped = values.minimum(self.limits(bounds))
        shifted = torch.cat([self._values[:, 1:], capped[:, None]], dim=1)
        num_above = torch.where(values > bounds, self._num_above + 1, 0.0)
        self._values.copy_(torch.where(enters[:, None], shifted, self._values))
        self._num_above.copy_(torch.where(enters, num_above, self._num_above))

    def state_dict(self) -> dict[str, Any]:
        """Return for each series its values, oldest first, and how many in a row were above the limit. The host waits
        for them."""
        state = {}
        rows = zip(SERIES, self._values.tolist(), self._num_above.tolist(), strict=True)
        for name, values, num_above in rows:
            known = [value for value in values if not math.isnan(value)]
            state[name] = {"values": known, "num_above": int(num_above)}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the values, of which the newest that fit are kept; an empty `state` has none.

        Raises:
            ValueError: a series is not a list of finite numbers. Nothing has changed.
        """
        loaded = [_series(state.get(name) or {}, name) for name in SERIES]
        for row, (values, num_above) in enumerate(loaded):
            kept = values[-self.window :]
            padded = [math.nan] * (self.window - len(kept)) + kept
            self._values[row].copy_(torch.tensor(padded, dtype=torch.float64, device="cpu"))
            self._num_above[row] = float(num_above)


def check_spikes(state: Mapping[str, Any]) -> None:
    """Raise the ValueError of `Spikes.load_state_dict`."""
    for name in SERIES:
        _series(state.get(name) or {}, name)


def _series(saved: Mapping[str, Any], name: str) -> tuple[list[float], int]:
    try:
        values = [float(value) for value in saved.get("values", ())]
        num_above = int(saved.get("num_above", 0))
        is_valid = num_above >= 0 and all(map(math.isfinite, values))
    except (AttributeError, OverflowError, TypeError, ValueError):
        is_valid = False
    if not is_valid:
        raise ValueError(f"spikes: {name}={saved!r}; values must be finite numbers, and num_above a count")
    return values, num_above
