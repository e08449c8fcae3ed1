"""Main values on the host of a parameter on a device."""

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
    """Main values of one piece of a parameter, in the interface of `Main`, of which a rule moves `moved`.

    `moved` is beside memory of the host that stands for the parameter while it is updated. What that memory holds
    between updates means nothing: the parameter may have been written since.
    """

    target: Tensor  # on the device
    moved: Main | CodedMain  # on the host
    device: Device

    @classmethod
    def of(cls, numbers: Numbers, target: Tensor, device: Device, make: MakeMain) -> "HostMain":
        """The main values of `target`, starting from what it holds. The host waits for it."""
        here = device.to_host(target.detach())
        with device.on_host():
            return cls(target, make(numbers, here.contiguous()), device)

    @property
    def shape(self) -> torch.Size:
        """Of the piece."""
        return self.target.shape

    @property
    def numbers(self) -> Numbers:
        """In which numbers they are kept."""
        return self.moved.numbers

    @property
    def staged(self) -> Tensor:
        """The memory of the host that stands for the parameter, in its shape."""
        return self.moved.target

    @property
    def reads_param(self) -> bool:
        """Whether an update reads the parameter: its values are the main values, or a half of them."""
        return self.numbers in (Numbers.DIRECT, Numbers.REMAINDER)

    def stage_in(self, memory: Tensor) -> None:
        """Lets `memory`, contiguous in the parameter's shape, stand for the parameter from now on."""
        self.moved = replace(self.moved, target=memory)

    def kept(self) -> tuple[Tensor, ...]:
        """The memory that it takes beside the parameter, on the host."""
        return self.moved.kept()

    def value(self) -> Tensor:
        """The main values, exact: the parameter itself, or a tensor of the host."""
        if self.numbers is Numbers.DIRECT:
            return self.target
        self._fetch()
        with self.device.on_host():
            return self.moved.value()

    @torch.no_grad()
    def set_(self, value: Tensor) -> None:
        """Writes the main values, and the parameter with them."""
        here = self.device.to_host(value)
        with self.device.on_host():
            self.moved.set_(here)
        self.target.copy_(self.staged)

    @torch.no_grad()
    def reload_(self) -> None:
        """Takes the parameter's present value as the main value, after somebody else wrote the parameter."""
        self.staged.copy_(self.target)
        with self.device.on_host():
            self.moved.reload_()

    @torch.no_grad()
    def _fetch(self) -> None:
        if self.reads_param:
            self.staged.copy_(self.target)
