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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from opt_distributed.comm.device import Device, Event, HostCopy
from opt_distributed.pieces.coded_main import CodedMain
from opt_distributed.pieces.mains import Main, Numbers
from opt_distributed.pieces.quantized import QuantizedMain
from opt_paramgroups import ParamId

Groups = Sequence[Mapping[str, Any]]
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


class Staged(Protocol):
    """The attributes of a piece that copies need."""

    @property
    def id(self) -> ParamId: ...

    @property
    def main(self) -> Main | CodedMain | HostMain | QuantizedMain: ...


class OnHost(NamedTuple):
    """The inputs of an update on the host."""

    proceeds: bool  # False: the step is skipped
    grads: Sequence[Tensor]
    scale_of_slot: Sequence[float]


class StepNumbers:
    """The verdict and the gradient scales of a step, copied to the host once for all units."""

    def __init__(self, device: Device):
        self._device = device
        self._copy: HostCopy | None = None  # of this step, once it is queued

    def forget(self) -> None:
        """Drop the copy of the last step. The verdict of the next one may be in the same memory."""
        self._copy = None

    def fetch(self, scale_of_slot: Sequence[float | Tensor], skip: Tensor) -> None:
        """Queue the copy to the current stream, unless it is queued for this step already."""
        if self._copy is None:
            numbers = [torch.as_tensor(one, dtype=torch.float64, device=skip.device) for one in (skip, *scale_of_slot)]
            self._copy = HostCopy(torch.stack(numbers), self._device)

    def wait(self) -> tuple[bool, list[float]]:
        """Wait for the copy; return whether the step is skipped, and the scales."""
        assert self._copy is not None
        skipped, *scales = self._copy.wait().tolist()
        return bool(skipped), scales


class HostSide:
    """Staging memory and copies of one unit. The `main` of every piece is a `HostMain`."""

    def __init__(
        self,
        pieces: Sequence[Staged],
        device: Device,
        numbers: StepNumbers,
        *,
        overlap: bool,
        pin_grads: bool,
        pin_params: bool,
    ):
        self.device, self.numbers = device, numbers
        self._overlap, self._pin_grads, self._pin_params = overlap, pin_grads, pin_params
        self._arrived: Event | None = None
        self._grads: dict[
            tuple[ParamId, torch.dtype], Tensor
        ] = {}  # allocated at the first step, in the gradients' dtype
        for dtype in dict.fromkeys(piece.main.target.dtype for piece in pieces):
            same = [piece for piece in pieces if piece.main.target.dtype is dtype]
            for piece, memory in zip(same, self._views(same, dtype, pinned=pin_params), strict=True):
                _main(piece).stage_in(memory)

    @torch.no_grad()
    def fetch_(
        self,
        pieces: Sequence[Staged],
        grads: Sequence[Tensor],
        scale_of_slot: Sequence[float | Tensor],
        skip: Tensor,
    ) -> None:
        """Queue copies to the host: of gradients, of parameters whose bits the update reads, and of the verdict."""
        self.numbers.fetch(scale_of_slot, skip)
        self._make_staging(pieces, grads)
        stream = self._begin()
        with self.device.on(stream):
            for piece, grad in zip(pieces, grads, strict=True):
                self._grads[piece.id, grad.dtype].copy_(grad, non_blocking=self._pin_grads)
                main = _main(piece)
                if main.reads_param:
                    main.staged.copy_(main.target, non_blocking=self._pin_params)
            self._arrived = stream.record_event()

    def wait(self, pieces: Sequence[Staged], grads: Sequence[Tensor]) -> OnHost:
        """Wait for the copies that `fetch_` queued, and return them. `pieces` and `grads` are those of `fetch_`.

        After the wait, the staging memory of parameters is free, too: copies of the previous step were queued earlier.
        """
        assert self._arrived is not None
        self._arrived.synchronize()
        skipped, scales = self.numbers.wait()
        fetched = [self._grads[piece.id, grad.dtype] for piece, grad in zip(pieces, grads, strict=True)]
        return OnHost(not skipped, fetched, scales)

    @torch.no_grad()
    def return_(self, pieces: Sequence[Staged]) -> None:
        """Queue copies of the updated values to the parameters. The compute stream waits for them."""
        stream = self.device.side_stream() if self._overlap else self.device.current_stream()
        with self.device.on(stream):
            for main in map(_main, pieces):
                main.target.copy_(main.staged, non_blocking=self._pin_params)
            done = stream.record_event()
        self.device.current_stream().wait_event(done)

    def numbers_of(self, groups: Groups) -> Groups:
        """The groups, with 0-d tensors such as a learning rate on the device converted to numbers."""
        return [{name: _number(value) for name, value in group.items()} for group in groups]

    def _begin(self) -> Any:
        """The stream for copies, after what the compute stream has written so far."""
        current = self.device.current_stream()
        if not self._overlap:
            return current
        side = self.device.side_stream()
        side.wait_event(current.record_event())
        return side

    def _make_staging(self, pieces: Sequence[Staged], grads: Sequence[Tensor]) -> None:
        by_dtype: dict[torch.dtype, list[Staged]] = {}
        for piece, grad in zip(pieces, grads, strict=True):
            if (piece.id, grad.dtype) not in self._grads:
                by_dtype.setdefault(grad.dtype, []).append(piece)
        for dtype, new in by_dtype.items():
            for piece, view in zip(new, self._views(new, dtype, pinned=self._pin_grads), strict=True):
                self._grads[piece.id, dtype] = view

    def _views(self, pieces: Sequence[Staged], dtype: torch.dtype, *, pinned: bool) -> list[Tensor]:
        """Allocate one block of host memory, split into the shapes of the pieces."""
        shapes = [piece.main.target.shape for piece in pieces]
        flat = self.device.host_empty(sum(shape.numel() for shape in shapes), dtype, pinned=pinned)
        parts = torch.split(flat, [shape.numel() for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _main(piece: Staged) -> HostMain:
    assert isinstance(piece.main, HostMain)
    return piece.main


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, Tensor) and value.dim() == 0 else value
