"""Counts of updates: device tensors on an accelerator, because only the device knows which steps were skipped."""

import torch
from torch import Tensor


class StepCount:
    """The number of updates made so far to pieces that are always updated together.

    The host knows the number until a device first decides whether an update is made. From then on it is a 0-d int64
    tensor, and `int(count)` waits for the device. After `stay_on`, it is always the same tensor, as graphs require.
    """

    __slots__ = ("_next", "_on_device", "_stays", "known")

    def __init__(self, known: int | None = 0, on_device: Tensor | None = None):
        self.known = known
        self._on_device = on_device
        self._stays = False
        self._next: Tensor | None = None  # `_on_device` + 1, once it was computed

    def __int__(self) -> int:
        if self.known is not None:
            return self.known
        assert self._on_device is not None
        number = int(self._on_device)
        if not self._stays:  # a replay counts without the host, so the number must not be cached
            self.known = number
        return number

    def stay_on(self, device: torch.device) -> None:
        """Keep the number in one tensor on `device` from now on."""
        if self._stays:
            return
        if self.known is not None:
            self._on_device = torch.full((), self.known, dtype=torch.int64, device=device)
        assert self._on_device is not None
        self._on_device = self._on_device.clone()  # copies of this count may share the tensor
        self.known, self._stays = None, True

    def copy(self) -> "StepCount":
        """Return a separate count with the same number, for pieces that are updated separately from now on."""
        on_device = self._on_device
        return StepCount(self.known, on_device.clone() if self._stays and on_device is not None else on_device)

    def next(self) -> int | Tensor:
        """The number of the next update, counted from 1."""
        if self.known is not None:
            return self.known + 1
        assert self._on_device is not None
        if self._stays:
            return self._on_device + 1
        if self._next is None:
            self._next = self._on_device + 1
        return self._next

    def advance(self, skip: Tensor | None) -> None:
        """Count an update, unless `skip` (a 0-d bool on the device) is true; None stands for false."""
        if self._stays:
            assert self._on_device is not None
            self._on_device.add_(1 if skip is None else ~skip)
            return
        before, after = self._on_device if self.known is None else self.known, self.next()
        if skip is not None:
            assert before is not None
            after = torch.where(skip, before, after)
        self.known, self._on_device = (after, None) if isinstance(after, int) else (None, after)
        self._next = None
