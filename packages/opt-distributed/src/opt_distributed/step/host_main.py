"""Main values in host memory, of a parameter on a device."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from opt_distributed.comm.device import Device
from opt_distributed.step.coded_main import CodedMain
from opt_distributed.step.mains import Main, Numbers

MakeMain = Callable[[Numbers, Tensor], Main | CodedMain]


@dataclass(slots=True)
class HostMain:
    """Main values of one piece of a parameter, with the interface of `Main`. A rule updates `moved`.

    The target of `moved` is `staged`: host memory that stands in for the parameter during an update. Its contents
    between updates are meaningless, because the parameter may have been written since.
    """

    target: Tensor  # on the device
    moved: Main | CodedMain  # on the host
    device: Device

    @classmethod
    def of(cls, numbers: Numbers, target: Tensor, device: Device, make: MakeMain) -> "HostMain":
        """Create the main values of `target` from its present values, for which the host waits."""
        here = device.to_host(target.detach())
        with device.on_host():
            return cls(target, make(numbers, here.contiguous()), device)

    @property
    def shape(self) -> torch.Size:
        """Shape of the piece."""
        return self.target.shape

    @property
    def numbers(self) -> Numbers:
        """The number format of the main values."""
        return self.moved.numbers

    @property
    def staged(self) -> Tensor:
        """The host memory that stands in for the parameter, in its shape."""
        return self.moved.target

    @property
    def reads_param(self) -> bool:
        """Whether an update reads the parameter, because its bits are the main values or a half of them."""
        return self.numbers in (Numbers.DIRECT, Numbers.REMAINDER, Numbers.SHORT_REMAINDER)

    def stage_in(self, memory: Tensor) -> None:
        """Use `memory`, contiguous in the parameter's shape, as `staged` from now on."""
        self.moved = replace(self.moved, target=memory)

    def kept(self) -> tuple[Tensor, ...]:
        """The tensors kept in addition to the parameter, on the host."""
        return self.moved.kept()

    def value(self) -> Tensor:
        """The exact main values: the parameter itself, or a host tensor."""
        if self.numbers is Numbers.DIRECT:
            return self.target
        self._fetch()
        with self.device.on_host():
            return self.moved.value()

    @torch.no_grad()
    def set_(self, value: Tensor) -> None:
        """Write the main values and the parameter."""
        here = self.device.to_host(value)
        with self.device.on_host():
            self.moved.set_(here)
        self.target.copy_(self.staged)

    @torch.no_grad()
    def reload_(self) -> None:
        """Set the main values from the parameter, after other code wrote the parameter."""
        self.staged.copy_(self.target)
        with self.device.on_host():
            self.moved.reload_()

    @torch.no_grad()
    def _fetch(self) -> None:
        if self.reads_param:
            self.staged.copy_(self.target)
