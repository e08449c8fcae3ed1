"""Units whose state is kept and updated in host memory: their main values, and copies from and to the device.

    gradients ─ fetch_ ─▶ staging ─ the rule, on host memory ─▶ staging ─ return_ ─▶ parameters

Copies to the host start as soon as gradients are reduced. The host waits for them and for the verdict of the step just
before the update, so that it computes while the device updates other units. With `overlap`, copies are queued to the
side stream: those of a later unit run while the host updates an earlier one.

On a CPU, units have no `HostSide`.

The host does not update speculatively, as SuperOffload does. In a step that could hide only the wait for the verdict:
the statistics, one read of the gradients at the bandwidth of the device. To roll back to the bit, the host would have
to keep main values and moments of before each step. Copying these takes 1.8 times as long as the update: 5.5 ms against
3.0 ms of processor time for 4.2 million fp32 elements of AdamW on one thread. Undoing the arithmetic would round.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opt_config import OnHost
from opt_distributed.comm.device import Device, Event, Stream
from opt_distributed.pieces.piece import Groups, OwnedPiece, Ready, Update
from opt_kernels.params import Main, MainFormat, make_main


@dataclass(slots=True, eq=False, kw_only=True)
class HostMain(Main):
    """Main values in host memory of a piece on the device: a rule updates `on_host`.

    The target of `on_host` stands in for the parameter during an update. Its contents between updates are meaningless,
    because the parameter may have been written since.
    """

    on_host: Main
    device: Device
    returned: Event | None = None  # until the host waits for it: when the main values of the last step arrive

    @classmethod
    def of(cls, format: MainFormat, target: Tensor, device: Device) -> "HostMain":
        """Create the main values of `target` from its present values, for which the host waits."""
        here = device.to_host(target.detach())
        with device.on_host():
            on_host = make_main(format, here.contiguous())
        return cls(target=target, kept=on_host.kept, on_host=on_host, device=device)

    @property
    def updated(self) -> Main:
        return self.on_host

    def memory(self) -> AbstractContextManager[None]:
        return self.device.on_host()

    @property
    def staged(self) -> Tensor:
        """The host memory that stands in for the parameter, in its shape."""
        return self.on_host.target

    @property
    def is_copy(self) -> bool:
        return self.on_host.is_copy

    def present(self) -> Tensor:
        return self.device.to_host(self.target)

    @torch.no_grad()
    def value(self) -> Tensor:
        if not self.kept:
            return self.target
        self.settle()
        if not self.is_copy:  # the bits of the parameter are the main values or a half of them
            self.staged.copy_(self.target)
        with self.memory():
            return self.on_host.value()

    @torch.no_grad()
    def set_(self, value: Tensor) -> None:
        self.settle()
        here = self.device.to_host(value)
        with self.memory():
            self.on_host.set_(here)
        self.target.copy_(self.staged)

    @torch.no_grad()
    def reload_(self) -> None:
        self.settle()
        self.staged.copy_(self.target)
        with self.memory():
            self.on_host.reload_()

    def settle(self) -> None:
        """Wait until host memory has the main values and states of the last step."""
        if self.returned is not None:
            self.returned.synchronize()
            self.returned = None


class HostSide:
    """Staging memory and copies of one unit. The `main` of every piece is a `HostMain`."""

    computes_on_host = True  # else the device updates the unit: see `Streamed`

    def __init__(self, pieces: Sequence[OwnedPiece], device: Device, placement: OnHost):
        self.device = device
        self._placement = placement
        self._arrived: Event | None = None
        self._grads: Sequence[Tensor] = ()  # of the last step
        for main in mains_on_host(pieces):
            memory = device.host_empty(main.shape.numel(), main.target.dtype, pinned=placement.pin_params)
            main.on_host.target = memory.view(main.shape)

    def copying_stream(self) -> Stream:
        """The stream of copies between host and device."""
        return self.device.side_stream() if self._placement.overlap else self.device.current_stream()

    @torch.no_grad()
    def fetch_(self, update: Update) -> None:
        """Queue copies to the host: of gradients, and of parameters whose bits the update reads."""
        pieces, grads, _ = update.ready
        pinned = self._placement.pin_grads
        self._grads = [self.device.host_empty(x.numel(), x.dtype, pinned=pinned).view(x.shape) for x in grads]
        stream = self.copying_stream()
        stream.wait_event(self.device.current_stream().record_event())  # after what was written so far
        with self.device.on(stream):
            for main, staged, grad in zip(mains_on_host(pieces), self._grads, grads, strict=True):
                staged.copy_(grad, non_blocking=pinned)
                if not main.is_copy:
                    main.staged.copy_(main.target, non_blocking=self._placement.pin_params)
            self._arrived = stream.record_event()

    def wait(self, update: Update) -> Update:
        """Wait for the copies that `fetch_` queued, and return the update of host memory; of no piece if it is skipped.

        After the wait, the staging memory of parameters is free, too: copies of the previous step were queued earlier.
        """
        ready = Ready(update.ready.pieces, self._grads)
        assert self._arrived is not None
        assert update.on_host is not None
        self._arrived.synchronize()
        skipped, *scales = update.on_host.wait().tolist()
        if skipped:
            ready = Ready((), ())
        return Update(ready, self.numbers_of(update.groups), scales, is_skipped=bool(skipped))

    @torch.no_grad()
    def return_(self, pieces: Sequence[OwnedPiece]) -> None:
        """Queue copies of the updated values to the parameters. The compute stream waits for them."""
        stream = self.copying_stream()
        with self.device.on(stream):
            for main in mains_on_host(pieces):
                main.target.copy_(main.staged, non_blocking=self._placement.pin_params)
        self.device.current_stream().wait_event(stream.record_event())

    def numbers_of(self, groups: Groups) -> Groups:
        """The entries of the groups without `params`, with 0-d tensors such as a learning rate on the device converted
        to numbers."""
        return [{name: _number(group[name]) for name in group if name != "params"} for group in groups]


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, Tensor) and value.dim() == 0 else value


def mains_on_host(pieces: Iterable[OwnedPiece]) -> list[HostMain]:
    """The main values that are in host memory, of pieces on the device."""
    return [piece.main for piece in pieces if isinstance(piece.main, HostMain)]
