"""Move state to the host between steps, to free device memory, for example for the rollouts of an RL loop."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from opt_distributed.comm import device as devices
from opt_distributed.step import Stepper


class _View(NamedTuple):
    """A state tensor, and the size, stride and offset by which it views its memory."""

    tensor: Tensor
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def show(self, memory: Tensor) -> None:
        """Make the tensor view the same elements of `memory`, (n,) uint8."""
        dtype = self.tensor.dtype
        elements = memory[: len(memory) - len(memory) % dtype.itemsize].view(dtype)
        self.tensor.data = elements.as_strided(self.size, self.stride, self.offset)


class _Memory(NamedTuple):
    """One allocation, and all state tensors in it."""

    views: Sequence[_View]

    def whole(self) -> Tensor:
        """Return the whole allocation as (n,) uint8."""
        narrow = min((view.tensor for view in self.views), key=lambda tensor: tensor.dtype.itemsize).detach()
        numel = narrow.untyped_storage().nbytes() // narrow.dtype.itemsize
        return narrow.as_strided((numel,), (1,), 0).view(torch.uint8)

    def move_to(self, memory: Tensor) -> None:
        """Make all tensors view `memory`. The old allocation is freed with the last tensor that views it."""
        for view in self.views:
            view.show(memory)


class StateOffload:
    """Moves the state of device units to the host and back. Units that live on the host are not moved.

    Copies use pinned memory and run on the side stream; the host does not wait for them. Work that is queued to the
    compute stream later waits for the copies, so freed memory is not overwritten too early.
    """

    def __init__(self, stepper: Stepper) -> None:
        self._units = [unit for unit in stepper.units if unit.host is None]
        self._place = stepper.device
        self._device = devices.device_of(stepper.device)
        self._away: list[_Memory] | None = None  # while the state is on the host

    def check_restored(self, what: str) -> None:
        """Raise RuntimeError while the state is on the host; `what` names the call for the message."""
        if self._away is not None:
            raise RuntimeError(
                f"{what} while the state is on the host, between offload_to_cpu() and restore_from_cpu(); call "
                "optimizer.restore_from_cpu() first"
            )

    @torch.no_grad()
    def offload_(self) -> None:
        """Move the state to the host and free its device memory; do nothing if it is on the host already.

        If host memory runs out, nothing has moved.
        """
        if self._away is None:
            memories = list(_memories(self._tensors())) if self._device.is_asynchronous else []
            sources = [memory.whole() for memory in memories]
            targets = [self._device.host_empty(len(source), torch.uint8, pinned=True) for source in sources]
            self._move(memories, sources, targets)
            self._away = memories

    @torch.no_grad()
    def restore_(self) -> None:
        """Move the state back to the device; do nothing if it is on the device already.

        If device memory runs out, the state is still on the host, and the call may be repeated.
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
        """Yield the state on the device and separate main values, except tensors that share a parameter's memory."""
        pieces = [piece for unit in self._units for piece in unit.pieces]
        kept = [piece.main.kept() for piece in pieces]
        # The main values of an fp8 parameter are the target themselves; the parameter has other memory.
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
