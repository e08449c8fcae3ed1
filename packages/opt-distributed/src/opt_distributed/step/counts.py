"""How many updates pieces have had: on an accelerator a device tensor, since only the device knows what was skipped."""

import torch
from torch import Tensor


class StepCount:
    """Updates made so far of pieces that always step together.

    The host knows the number until a device first decides whether a step is made. After that it is a 0-d int64 tensor,
    and `int(count)` waits for the device. A count that stays on the device is one tensor for good, as graphs need it.
    """

    __slots__ = ("_on_device", "_stays", "known")

    def __init__(self, known: int | None = 0, on_device: Tensor | None = None):
        self.known = known
        self._on_device = on_device
        self._stays = False

    def __int__(self) -> int:
        if self.known is not None:
            return self.known
        assert self._on_device is not None
        number = int(self._on_device)
        if not self._stays:  # else a replay counts, and the host hears nothing of it
            self.known = number
        return number

    def stay_on(self, device: torch.device) -> None:
        """Keeps the number in one tensor of `device` from now on."""
        if self._stays:
            return
        if self.known is not None:
            self._on_device = torch.full((), self.known, dtype=torch.int64, device=device)
        assert self._on_device is not None
        self._on_device = self._on_device.clone()  # a copy of this count may share it
        self.known, self._stays = None, True

    def copy(self) -> "StepCount":
        """Another count of the same number, for pieces that step without the others from now on."""
        on_device = self._on_device
        return StepCount(self.known, on_device.clone() if self._stays and on_device is not None else on_device)

    def next(self) -> int | Tensor:
        """The number of the update that comes now; counted from 1."""
        if self.known is not None:
            return self.known + 1
        assert self._on_device is not None
        return self._on_device + 1

    def advance(self, proceeds: Tensor | None) -> None:
        """Counts an update; of which `proceeds`, a 0-d bool on the device, says whether it is made. None: it is."""
        made = 1 if proceeds is None else proceeds.to(torch.int64)
        if self._stays:
            assert self._on_device is not None
            self._on_device.add_(made)
            return
        before = self.known if self.known is not None else self._on_device
        assert before is not None
        after = before + made
        self.known, self._on_device = (after, None) if isinstance(after, int) else (None, after)
