"""`Count`: the number of updates made to parameters that are always updated together."""

import torch
from torch import Tensor


class Count:
    """The number of updates made so far.

    The host knows the number until a device first decides whether an update is made. From then on it is in a tensor on
    the device, always the same one, because only the device knows which steps were skipped: `int(count)` waits for it.

    Drop-ins show it as the elements of one tensor: torch's `step` states, float32, exact up to 2**24.
    """

    __slots__ = ("_next", "_shown", "_stays", "_version", "known")

    def __init__(self, known: int | None = 0, on_device: Tensor | None = None, *, shown: Tensor | None = None):
        self.known = known  # None: only the device knows it
        self._next = on_device  # 0-d int64: the number of the next update
        self._stays = False  # whether others than `advance` count, too
        self._shown = shown
        self._version = -1 if shown is None else shown._version

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
            self.known = None
            self._stays = True

    def copy(self) -> "Count":
        """Return a separate count with the same number, for parameters that are updated separately from now on."""
        with torch.inference_mode(False):
            return Count(self.known, None if self._next is None else self._next.clone())

    def next(self) -> int | Tensor:
        """Return the number of the next update, from 1. A tensor is always the same one, and `advance` writes it."""
        if self._next is not None:
            return self._next
        assert self.known is not None
        return self.known + 1

    def advance(self, skip: Tensor | None) -> None:
        """Count an update, unless `skip` (a 0-d bool on the device) is true; None stands for false."""
        if skip is not None:
            self._on(skip.device).add_(~skip)
            self.known = None
        elif self._next is not None:
            self._next.add_(1)
        if self.known is not None:
            self.known += 1
        if self._shown is not None:
            if self.known is not None:
                self._shown.fill_(self.known)
            else:
                self._shown.copy_(self._on(self._shown.device) - 1)
            self._version = self._shown._version

    def is_as_shown(self) -> bool:
        """Return whether no other code has written the shown tensor. Also compares values on the host: collectives,
        `.data` and NumPy write without increasing the version counter."""
        assert self._shown is not None
        is_written = self._shown._version != self._version
        return not is_written and (self.known is None or bool((self._shown == self.known).all()))

    def _on(self, device: torch.device) -> Tensor:
        """The tensor of the next number, created on `device` if there is none."""
        if self._next is None:
            assert self.known is not None
            with torch.inference_mode(False):  # a step outside of inference mode must be able to write it, too
                self._next = torch.full((), self.known + 1, dtype=torch.int64, device=device)
        return self._next
