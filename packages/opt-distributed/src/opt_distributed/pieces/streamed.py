"""Units whose state is kept in host memory and updated on the device, run by run.

    host ─ side stream ─▶ memory of run k+1 ┐
                          memory of run k   ┴ the rule, on the device ─ side stream ─▶ host

Two blocks of device memory take turns: while the device updates one run, the next is fetched, and the one before
returns. A run is what is exchanged together, a few stacks of equal matrices, or 2^24 elements, so that a matrix is
updated with the same others as without offload. The host waits for nothing. (DeepSpeed's issue 8463 describes the need:
Newton-Schulz on the processor takes minutes.)
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from typing import NamedTuple

import torch
from torch import Tensor

from opt_config import OnHost
from opt_distributed.comm.device import Device, Event, Stream
from opt_distributed.pieces.exchange import ComputeStage, by_stage
from opt_distributed.pieces.offload import HostSide, mains_on_host
from opt_distributed.pieces.piece import OwnedPiece, Ready
from opt_kernels.matrices import stacks
from opt_kernels.rules import Needs, Rule
from opt_kernels.works import Batch, Hyper, Task, Work

RUN_NUMEL = 1 << 24  # elements at which a run of whole matrices, or of elements, is complete
APART = 512  # tensors begin at multiples of this number of bytes
_ANY = Hyper(lr=0.0)  # how pieces are divided does not depend on it


class Streamed(HostSide):
    """Fetches the state of a unit from host memory run by run, and returns it."""

    computes_on_host = False

    def __init__(self, pieces: Sequence[OwnedPiece], device: Device, placement: OnHost):
        super().__init__(pieces, device, placement)
        with device.on_host():
            for tensor in _kept(pieces):
                memory = device.host_empty(tensor.numel(), tensor.dtype, pinned=placement.pin_params)
                tensor.data = memory.as_strided(tensor.size(), tensor.stride()).copy_(tensor)

    def stream_(self, runs: Sequence[Ready], update_: Callable[[Ready], None]) -> None:
        """Call `update_` with each run, whose main values and states are on the device. The compute stream waits for
        the last return."""
        if not runs:
            return
        current = self.device.current_stream()
        side = self.copying_stream()
        device = runs[0].grads[0].device
        num_bytes = max(sum(map(_num_bytes, _kept(run.pieces))) for run in runs)
        memories = [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in runs[:2]]
        side.wait_event(current.record_event())
        fetched = (self._fetched(run, memory, side) for run, memory in zip(runs, cycle(memories)))
        coming = next(fetched, None)
        try:
            while coming is not None:
                run = coming
                coming = next(fetched, None)
                current.wait_event(run.arrived)
                update_(run.ready)
                side.wait_event(current.record_event())
                with self.device.on(side):
                    for on_host, on_device in run.copies:
                        on_host.copy_(on_device, non_blocking=True)
        finally:  # after an error, earlier runs return, too
            returned = side.record_event()
            current.wait_event(returned)
            for main in mains_on_host(piece for ready in runs for piece in ready.pieces):
                main.returned = returned

    def _fetched(self, ready: Ready, memory: Tensor, stream: Stream) -> "_Fetched":
        """Queue the copies of a run to device memory."""
        lengths = [_num_bytes(tensor) for tensor in _kept(ready.pieces)]
        copies = []
        for tensor, part in zip(_kept(ready.pieces), torch.split(memory[: sum(lengths)], lengths), strict=True):
            on_device = part[: tensor.nbytes].view(tensor.dtype).as_strided(tensor.size(), tensor.stride())
            copies.append((tensor, on_device))
        with self.device.on(stream):
            for tensor, on_device in copies:
                on_device.copy_(tensor, non_blocking=True)
            arrived = stream.record_event()
        left = (on_device for _, on_device in copies)
        pieces = []
        for piece in ready.pieces:
            state = dict(zip(piece.state, left))
            main = type(piece.main.updated)(piece.main.target, dict(zip(piece.main.kept, left)))
            pieces.append(replace(piece, state=state, main=main))
        return _Fetched(Ready(pieces, ready.grads), copies, arrived)


class _Fetched(NamedTuple):
    """A run with main values and states in device memory."""

    ready: Ready
    copies: Sequence[tuple[Tensor, Tensor]]  # in host memory, and on the device
    arrived: Event


def runs_of_ready(rule: Rule, ready: Ready, stages: Sequence[ComputeStage]) -> list[Ready]:
    """Divide pieces into runs, in the order in which they are updated: the same on ranks that compute together."""
    of_work = {}
    tasks = []
    for piece, grad in zip(ready.pieces, ready.grads, strict=True):
        work = Work(grad=grad, main=piece.main.target, state=piece.state, matrix=piece.matrix)
        of_work[id(work)] = piece
        tasks.append(Task(_ANY, work))
    if rule.needs is Needs.MATRICES:
        here, staged = by_stage([Batch(_ANY, [task.work for task in tasks])], stages)
        runs = _joined(stacks(here))
        for stage, of_stage in staged.items():
            runs += stage.runs(of_stage)
    else:
        runs = _joined([task] for task in tasks)
    return [Ready([of_work[id(work)] for _, work in run], [work.grad for _, work in run]) for run in runs]


def _joined(parts: Iterable[list[Task]]) -> list[list[Task]]:
    """Join parts until they have enough elements."""
    runs: list[list[Task]] = []
    left = 0
    for part in parts:
        if left <= 0:
            runs.append([])
            left = RUN_NUMEL
        runs[-1] += part
        left -= sum(task.work.grad.numel() for task in part)
    return runs


def _kept(pieces: Iterable[OwnedPiece]) -> Iterator[Tensor]:
    """The tensors in host memory of these pieces."""
    return (tensor for piece in pieces for tensor in (*piece.state.values(), *piece.main.kept.values()))


def _num_bytes(tensor: Tensor) -> int:
    """The device memory of a tensor."""
    return -(-tensor.nbytes // APART) * APART
