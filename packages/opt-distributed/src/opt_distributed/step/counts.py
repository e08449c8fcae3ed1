"""How many updates pieces have had: on an accelerator a device tensor, since only the device knows what was skipped."""

import torch
from torch import Tensor


class StepCount:
    """Updates made so far of pieces that always step together.

    The host knows the number until a device first decides whether a step is made. After that it is a 0-d int64 tensor,
    and `int(count)` waits for the device.
    """

    __slots__ = ("_on_device", "known")

    def __init__(self, known: int | None = 0, on_device: Tensor | None = None):
        self.known = known
        self._on_device = on_device

    def __int__(self) -> int:
        if self.known is None:
            assert self._on_device is not None
            self.known = int(self._on_device)
        return self.known

    def copy(self) -> "StepCount":
        """Another count of the same number, for pieces that step without the others from now on."""
        return StepCount(self.known, self._on_device)

    def next(self) -> int | Tensor:
        """The number of the update that comes now; counted from 1."""
        if self.known is not None:
            return self.known + 1
        assert self._on_device is not None
        return self._on_device + 1

    def advance(self, proceeds: Tensor | None) -> None:
        """Counts an update; of which `proceeds`, a 0-d bool on the device, says whether it is made. None: it is."""
        made = 1 if proceeds is None else proceeds.to(torch.int64)
        before = self.known if self.known is not None else self._on_device
        assert before is not None
        after = before + made
        self.known, self._on_device = (after, None) if isinstance(after, int) else (None, after)
