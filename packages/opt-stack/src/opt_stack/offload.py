"""State on the host between steps: the device's memory is free meanwhile, for the rollouts of an RL loop."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from opt_distributed.comm import device as devices
from opt_distributed.step.stepper import Stepper


class _View(NamedTuple):
    """A tensor of the state, and which elements of its memory it shows."""

    tensor: Tensor
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def show(self, memory: Tensor) -> None:
        """Lets the tensor show the same elements of `memory`, (n,) uint8, in place of its own."""
        dtype = self.tensor.dtype
        elements = memory[: len(memory) - len(memory) % dtype.itemsize].view(dtype)
        self.tensor.data = elements.as_strided(self.size, self.stride, self.offset)


class _Memory(NamedTuple):
    """One allocation, and all tensors of the state in it."""

    views: Sequence[_View]

    def whole(self) -> Tensor:
        """(n,) uint8: all of it."""
        narrow = min((view.tensor for view in self.views), key=lambda tensor: tensor.dtype.itemsize).detach()
        numel = narrow.untyped_storage().nbytes() // narrow.dtype.itemsize
        return narrow.as_strided((numel,), (1,), 0).view(torch.uint8)

    def move_to(self, memory: Tensor) -> None:
        """Lets all tensors lie in `memory`. Their old one is given back with the last tensor that shows it."""
        for view in self.views:
            view.show(memory)


class StateOffload:
    """Where the state of the units of a device is: there, or on the host. Units of the host are not concerned.

    Copies are pinned and run on the side stream; the host waits for none. Work that is queued to the compute stream
    later runs after them, so that memory which is given back is not written by its next owner too early.
    """

    def __init__(self, stepper: Stepper) -> None:
        self._units = [unit for unit in stepper.units if unit.host is None]
        self._place = stepper.device
        self._device = devices.device_of(stepper.device)
        self._away: list[_Memory] | None = None  # while the state is on the host

    def check_restored(self, what: str) -> None:
        """Raises RuntimeError while the state is on the host."""
        if self._away is not None:
            raise RuntimeError(
                f"{what} while the state is on the host, between offload_to_cpu() and restore_from_cpu(); call "
                "optimizer.restore_from_cpu() first"
            )

    @torch.no_grad()
    def offload_(self) -> None:
        """Moves the state to the host, and gives its device memory back. Nothing happens where it is there already.

        Where host memory runs out, nothing has moved.
        """
        if self._away is None:
            memories = list(_memories(self._tensors())) if self._device.is_asynchronous else []
            sources = [memory.whole() for memory in memories]
            targets = [self._device.host_empty(len(source), torch.uint8, pinned=True) for source in sources]
            self._move(memories, sources, targets)
            self._away = memories

    @torch.no_grad()
    def restore_(self) -> None:
        """Moves the state back to the device. Nothing happens where it is there already.

        Where device memory runs out, the state is still on the host, and the call may be made again.
        """
        if self._away is not None:
            sources = [memory.whole() for memory in self._away]
            targets = [torch.empty(len(source), dtype=torch.uint8, device=self._place) for source in sources]
            self._move(self._away, sources, targets)
            self._away = None

    def _move(self, memories: Sequence[_Memory], sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        current, side = self._device.current_stream(), self._device.side_stream()
        side.wait_event(current.record_event())
        with self._device.on(side):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            done = side.record_event()
        current.wait_event(done)
        for memory, target in zip(memories, targets, strict=True):
            memory.move_to(target)

    def _tensors(self) -> Iterator[Tensor]:
        """The state on the device, and main values beside parameters, but nothing that lies in a parameter's memory."""
        pieces = [piece for unit in self._units for piece in unit.pieces]
        kept = [piece.main.kept() for piece in pieces]
        # Main values of a parameter in fp8 stand for the parameter, whose own memory is elsewhere.
        targets = [
            piece.main.target
            for piece, beside in zip(pieces, kept, strict=True)
            if all(tensor is not piece.main.target for tensor in beside)
        ]
        params = {target.untyped_storage().data_ptr() for target in targets}
        for piece, beside in zip(pieces, kept, strict=True):
            for tensor in (*piece.state.values(), *beside):
                storage = tensor.untyped_storage()
                if storage.nbytes() and storage.data_ptr() not in params and self._device.holds(tensor):
                    yield tensor


def _memories(tensors: Iterable[Tensor]) -> Iterator[_Memory]:
    by_address: dict[int, list[_View]] = {}
    for tensor in tensors:
        view = _View(tensor, tensor.size(), tensor.stride(), int(tensor.storage_offset()))
        by_address.setdefault(tensor.untyped_storage().data_ptr(), []).append(view)
    return map(_Memory, by_address.values())
