"""Units whose state is kept in host memory and updated on the device, run by run.

    host ─ side stream ─▶ memory of run k+1 ┐
                          memory of run k   ┴ the rule, on the device ─ side stream ─▶ host

Two blocks of device memory take turns: while the device updates one run, the next is fetched, and the one before
returns. A run is what is exchanged together, a few stacks of equal matrices, or 2^24 elements, so that a matrix is
updated with the same others as without offload. The host waits for nothing. (DeepSpeed's issue 8463 describes the need:
Newton-Schulz on the processor takes minutes.)
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from opt_config import OnHost
from opt_distributed.comm.device import Device, Event, Stream
from opt_distributed.pieces.exchange import ComputeStage
from opt_distributed.pieces.offload import HostMain, HostSide
from opt_distributed.pieces.piece import OwnedPiece
from opt_kernels.dtensor import first_number
from opt_kernels.matrices import stacks
from opt_kernels.params import CodedMain, Main
from opt_kernels.rules import Needs, Rule
from opt_kernels.works import Batch, Hyper, Task, Work

RUN_NUMEL = 1 << 24  # elements at which a run of whole matrices, or of elements, is complete
APART = 512  # tensors begin at multiples of this number of bytes


class Due(NamedTuple):
    """A piece that is to be updated."""

    hyper: Hyper
    piece: OwnedPiece
    grad: Tensor


class Streamed(HostSide):
    """Fetches the state of a unit from host memory run by run, and returns it."""

    computes_on_host = False

    def __init__(self, pieces: Sequence[OwnedPiece], device: Device, placement: OnHost):
        super().__init__(pieces, device, placement)
        self._returned: Event | None = None
        with device.on_host():
            for tensor in _kept(pieces):
                memory = device.host_empty(tensor.numel(), tensor.dtype, pinned=placement.pin_params)
                tensor.data = memory.as_strided(tensor.size(), tensor.stride()).copy_(tensor)

    def settle(self) -> None:
        """Wait until the host has the state of the last step."""
        if self._returned is not None:
            self._returned.synchronize()
            self._returned = None

    def stream_(
        self, runs: Sequence[Sequence[Due]], update_: Callable[[Sequence[Batch]], None], *, skip: Tensor | None
    ) -> None:
        """Update the pieces of each run by `update_`, on the device. The compute stream waits for the last return."""
        if not runs:
            return
        current = self.device.current_stream()
        side = self.device.side_stream() if self._placement.overlap else current
        where = runs[0][0].piece.main.target.device
        num_bytes = max(_num_bytes(_kept(due.piece for due in run)) for run in runs)
        memories = [torch.empty(num_bytes, dtype=torch.uint8, device=where) for _ in runs[:2]]
        side.wait_event(current.record_event())
        coming = _Run(runs[0], memories[0])
        coming.fetch_(self.device, side)
        try:
            for number in range(len(runs)):
                run = coming
                if number + 1 < len(runs):
                    coming = _Run(runs[number + 1], memories[(number + 1) % 2])
                    coming.fetch_(self.device, side)
                current.wait_event(run.arrived)
                update_(run.open_())
                run.close_(skip)
                side.wait_event(current.record_event())
                run.return_(self.device, side)
        finally:  # after an error, earlier runs return, too
            self._returned = side.record_event()
            current.wait_event(self._returned)
            for due in (due for run in runs for due in run):
                assert isinstance(due.piece.main, HostMain)
                due.piece.main.returned = self._returned


class _Run:
    """The pieces of one run, with main values and states in device memory."""

    arrived: Event

    def __init__(self, due: Sequence[Due], memory: Tensor):
        self._due = due
        self._copies: list[tuple[Tensor, Tensor]] = []  # in host memory, and on the device
        self._mains: list[Main] = []
        self._states: list[dict[str, Tensor]] = []
        start = 0
        for piece in (of_run.piece for of_run in due):
            on_host = piece.main.updated
            found = []
            for kept in (piece.state, on_host.kept):
                views = {}
                for name, tensor in kept.items():
                    stop = start + tensor.numel() * tensor.element_size()
                    views[name] = memory[start:stop].view(tensor.dtype).as_strided(tensor.size(), tensor.stride())
                    self._copies.append((tensor, views[name]))
                    start = _aligned(stop)
                found.append(views)
            self._states.append(found[0])
            self._mains.append(type(on_host)(piece.main.target, found[1]))

    def fetch_(self, device: Device, stream: Stream) -> None:
        """Queue the copies from the host to `stream`."""
        with device.on(stream):
            for on_host, on_device in self._copies:
                on_device.copy_(on_host, non_blocking=True)
            self.arrived = stream.record_event()

    def open_(self) -> list[Batch]:
        """The works of the run, by hyper-parameters. Decodes main values until `close_`."""
        found: dict[int, Batch] = {}
        for (hyper, piece, grad), main, state in zip(self._due, self._mains, self._states, strict=True):
            if isinstance(main, CodedMain):
                main.open_()
            tensors = main.columns()
            work = Work(
                grad=grad,
                main=tensors.main,
                state=state,
                out=tensors.out,
                remainder=tensors.remainder,
                matrix=piece.matrix,
                first=first_number(piece.param) + piece.of_param.start,
            )
            works = found.setdefault(id(hyper), Batch(hyper, [])).works
            assert isinstance(works, list)
            works.append(work)
        return list(found.values())

    def close_(self, skip: Tensor | None) -> None:
        """Encode main values that `open_` decoded."""
        for main in self._mains:
            if isinstance(main, CodedMain):
                main.close_(skip=skip)

    def return_(self, device: Device, stream: Stream) -> None:
        """Queue the copies to the host to `stream`."""
        with device.on(stream):
            for on_host, on_device in self._copies:
                on_host.copy_(on_device, non_blocking=True)


def runs_of_due(rule: Rule, due: Sequence[Due], stages: Sequence[ComputeStage]) -> list[list[Due]]:
    """Divide pieces into runs, in the order in which they are updated: the same on ranks that compute together."""
    if rule.needs is not Needs.MATRICES:
        return list(_joined([one] for one in due))
    of_work: dict[int, Due] = {}
    here: list[Batch] = []
    staged: dict[ComputeStage, list[Task]] = {stage: [] for stage in stages}
    for one in due:
        work = Work(grad=one.grad, main=one.piece.main.target, state=one.piece.state, matrix=one.piece.matrix)
        of_work[id(work)] = one
        if one.piece.stage is None:
            here.append(Batch(one.hyper, [work]))
        else:
            staged[one.piece.stage].append(Task(one.hyper, work))
    runs = list(_joined([of_work[id(task.work)] for task in stack] for stack in stacks(here)))
    for stage, tasks in staged.items():
        runs += [[of_work[id(task.work)] for task in run] for run in stage.runs(tasks)]
    return runs


def _joined(parts: Iterable[list[Due]]) -> Iterator[list[Due]]:
    """Join parts until they have enough elements."""
    run: list[Due] = []
    numel = 0
    for part in parts:
        run += part
        numel += sum(one.grad.numel() for one in part)
        if numel >= RUN_NUMEL:
            yield run
            run = []
            numel = 0
    if run:
        yield run


def _kept(pieces: Iterable[OwnedPiece]) -> list[Tensor]:
    """The tensors in host memory of these pieces."""
    return [tensor for piece in pieces for tensor in (*piece.state.values(), *piece.main.kept.values())]


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(_aligned(tensor.numel() * tensor.element_size()) for tensor in tensors)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // APART) * APART
