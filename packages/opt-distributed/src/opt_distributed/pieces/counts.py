"""Counts of updates: device tensors on an accelerator, because only the device knows which steps were skipped."""

import torch
from torch import Tensor


class StepCount:
    """The number of updates made so far to pieces that are always updated together.

    The host knows the number until a device first decides whether an update is made. From then on it is in a tensor on
    the device, always the same one, and `int(count)` waits for the device.
    """

    __slots__ = ("_next", "_stays", "known")

    def __init__(self, known: int | None = 0, on_device: Tensor | None = None):
        self.known = known  # None: only the device knows it
        self._next = on_device  # 0-d int64: the number of the next update
        self._stays = False  # whether others than `advance` count, too

    def __int__(self) -> int:
        if self.known is not None:
            return self.known
        assert self._next is not None
        number = int(self._next) - 1
        if not self._stays:  # a replay counts without the host, so the number must not be cached
            self.known = number
        return number

    def stay_on(self, device: torch.device) -> None:
        """Keep the number on `device` only, from now on. Replays of a graph may then count without the host."""
        if not self._stays:
            self._on(device)
            self.known, self._stays = None, True

    def copy(self) -> "StepCount":
        """Return a separate count with the same number, for pieces that are updated separately from now on."""
        with torch.inference_mode(False):
            return StepCount(self.known, None if self._next is None else self._next.clone())

    def next(self) -> int | Tensor:
        """The number of the next update, counted from 1. A tensor is always the same one, and `advance` writes it."""
        if self._next is not None:
            return self._next
        assert self.known is not None
        return self.known + 1

    def advance(self, skip: Tensor | None) -> None:
        """Count an update, unless `skip` (a 0-d bool on the device) is true; None stands for false."""
        if skip is not None:
            self._on(skip.device).add_(~skip)
            self.known = None
            return
        if self._next is not None:
            self._next.add_(1)
        if self.known is not None:
            self.known += 1

    def _on(self, device: torch.device) -> Tensor:
        """The tensor of the next number, created on `device` if there is none."""
        if self._next is None:
            assert self.known is not None
            with torch.inference_mode(False):  # a step outside of inference mode must be able to write it, too
                self._next = torch.full((), self.known + 1, dtype=torch.int64, device=device)
        return self._next
