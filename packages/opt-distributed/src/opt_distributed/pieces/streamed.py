"""Units whose state is kept in host memory and updated on the device, run by run.

    host ─ side stream ─▶ memory of run k+1 ┐
                          memory of run k   ┴ the rule, on the device ─ side stream ─▶ host

Two blocks of device memory take turns: while the device updates one run, the next is fetched, and the one before
returns. A run is what is exchanged together, a stack of equal matrices, or 2^24 elements, so that a matrix is updated
with the same others as without offload. The host waits for nothing. (DeepSpeed's issue 8463 describes the need:
Newton-Schulz on the processor takes minutes.)
"""

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, cycle, pairwise
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

RUN_NUMEL = 1 << 24  # elements in which the pieces of a run begin, if it is not one of matrices
APART = 512  # tensors begin at multiples of this number of bytes
_ANY = Hyper(lr=0.0)  # how pieces are divided does not depend on it


class Streamed(HostSide):
    """Fetches the state of a unit from host memory run by run, and returns it."""

    computes_on_host = False

    def __init__(self, pieces: Sequence[OwnedPiece], device: Device, placement: OnHost):
        super().__init__(pieces, device, placement)
        with device.on_host():
            for tensor in kept_tensors(pieces):
                memory = device.host_empty(tensor.numel(), tensor.dtype, pinned=placement.pin_params)
                tensor.data = memory.as_strided(tensor.size(), tensor.stride()).copy_(tensor)

    def streamed(self, runs: Sequence[Ready]) -> Generator[Ready, None, None]:
        """Yield the runs, with main values and states on the device, from which they return. Close this after an error.
        The compute stream waits for the last return."""
        if not runs:
            return
        current = self.device.current_stream()
        side = self.copying_stream()
        device = runs[0].grads[0].device
        num_bytes = max(sum(map(_num_bytes, kept_tensors(run.pieces))) for run in runs)
        memories = [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in runs[:2]]
        side.wait_event(current.record_event())
        fetched = (self._fetched(run, memory, side) for run, memory in zip(runs, cycle(memories)))
        try:
            for run, _ in pairwise(chain(fetched, [None])):  # the next one is fetched meanwhile
                assert run is not None
                current.wait_event(run.arrived)
                yield run.ready
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
        lengths = [_num_bytes(tensor) for tensor in kept_tensors(ready.pieces)]
        copies = []
        for tensor, part in zip(kept_tensors(ready.pieces), torch.split(memory[: sum(lengths)], lengths), strict=True):
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
    runs: list[list[Task]] = []
    if rule.needs is Needs.MATRICES:
        here, staged = by_stage([Batch(_ANY, [task.work for task in tasks])], stages)
        runs += stacks(here)
        for stage, of_stage in staged.items():
            runs += stage.runs(of_stage)
    else:
        by_start: dict[int, list[Task]] = {}
        start = 0
        for task in tasks:
            by_start.setdefault(start // RUN_NUMEL, []).append(task)
            start += task.work.grad.numel()
        runs += by_start.values()
    return [Ready([of_work[id(work)] for _, work in run], [work.grad for _, work in run]) for run in runs]


def kept_tensors(pieces: Iterable[OwnedPiece]) -> Iterator[Tensor]:
    """The states and main values that these pieces keep."""
    return (tensor for piece in pieces for tensor in (*piece.state.values(), *piece.main.kept.values()))


def _num_bytes(tensor: Tensor) -> int:
    """The device memory of a tensor."""
    return -(-tensor.nbytes // APART) * APART
