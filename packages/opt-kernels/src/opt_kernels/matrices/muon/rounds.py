"""Divides the matrices of a step for Muon's sweeps into rounds, stacks and slots, with their tables on the device.

A round is a batch of stacks that are in memory at the same time. A stack has the matrices of one shape. A slot is what
is divided by one norm: a matrix, or a split part of one, whose rows need not be adjacent. The runs of a slot are
consecutive in the chunk table, and every chunk record holds the number of its slot after the addresses.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from opt_kernels.backends.elements import LayoutError, compute_dtype, in_columns, lies_in_order
from opt_kernels.backends.tables import DeviceTables, to_device
from opt_kernels.backends.triton.launches import CALLS, Cut, Cutting, Launches, cut_sweeps
from opt_kernels.codecs import StateCodec
from opt_kernels.matrices.access import stacks
from opt_kernels.matrices.muon import MOMENTUM, Factors, Inputs
from opt_kernels.works import Batch, Hyper, Task, Work

ROUND_NUMEL = 1 << 27  # elements of the inputs that are held at once: 256 MiB in 16 bits
APART = 64  # stacks begin at multiples of this number of elements, for alignment


class Slot(NamedTuple):
    """The elements that are divided by one norm: a matrix of a work, or one split part of a matrix."""

    runs: tuple[tuple[int, int], ...]  # first element and number of elements, within the work
    factor: float


class Stack(NamedTuple):
    """Works of one layout, which are transformed together."""

    tasks: list[Task]
    begin: int  # its place in the round's u
    first_slot: int
    slots: tuple[Slot, ...]  # of each of its works
    inputs: Inputs

    @property
    def numel(self) -> int:
        return len(self.tasks) * self.tasks[0].work.grad.numel()

    @property
    def slots_of_all(self) -> slice:
        return slice(self.first_slot, self.first_slot + len(self.tasks) * len(self.slots))


class Round(NamedTuple):
    """Stacks with equal kinds of inputs, which are in memory at the same time."""

    inputs: Inputs
    stacks: list[Stack]
    numel: int  # of u

    @property
    def num_slots(self) -> int:
        stop: int = self.stacks[-1].slots_of_all.stop
        return stop

    def place_of(self, work: int) -> tuple[Stack, int]:
        """The stack of this work, and its number there."""
        for stack in self.stacks:
            if work < len(stack.tasks):
                return stack, work
            work -= len(stack.tasks)
        raise IndexError(work)


def with_ordered_grads(batches: Sequence[Batch]) -> list[Batch]:
    """`batches`, with contiguous copies of gradients that are not contiguous."""
    found = []
    for hyper, works in batches:
        ordered = list(works)
        for index, work in enumerate(ordered):
            if not lies_in_order(work.grad):
                ordered[index] = replace(work, grad=work.grad.resolve_neg().contiguous())
        found.append(Batch(hyper, ordered))
    return found


def rounds(batches: Sequence[Batch], inputs: Callable[[Work], Inputs], factors: Factors) -> Iterator[Round]:
    """The rounds of all non-empty works. Stacks have the order of `stacks`, which is equal on every rank."""
    current: list[Stack] = []
    place = 0
    slot = 0
    for tasks in stacks(batches):
        first = tasks[0].work
        wanted = inputs(first)
        numel = len(tasks) * first.grad.numel()
        if current:
            former = current[0].inputs
            if wanted[:2] != former[:2] or place + numel > ROUND_NUMEL:
                yield Round(former, current, place)
                current = []
                place = 0
                slot = 0
        slots = _slots(first, factors)
        current.append(Stack(tasks, place, slot, slots, wanted))
        place += -(-numel // APART) * APART
        slot += len(tasks) * len(slots)
    if current:
        yield Round(current[0].inputs, current, place)


def _slots(work: Work, factors: Factors) -> tuple[Slot, ...]:
    """The slots of a work in order: the split parts of its first matrix, then those of the second, and so on."""
    if work.matrix.part is not None and work.matrix.split_rows:
        raise LayoutError("a part of fused rows has no triton version, because it may begin anywhere; backend='torch'")
    *_, rows, cols = work.grad.shape
    sizes = work.matrix.split_rows or (rows,)
    found = []
    for matrix in range(work.grad.numel() // (rows * cols)):
        begin = 0
        for size, factor in zip(sizes, factors(work)):
            starts = range(matrix * rows + begin, (matrix + 1) * rows, sum(sizes))
            runs = tuple((start * cols, size * cols) for start in starts)
            if work.matrix.by_group:
                found += [Slot((run,), factor) for run in runs]
            else:
                found.append(Slot(runs, factor))
            begin += size
    return tuple(found)


def swept(round_: Round, hypers: Sequence[Hyper], codec: StateCodec) -> Launches:
    """The launches of a round. Every run of a slot is a separate run of the chunk table. `codec`: of the momentum."""
    rows = {id(hyper): row for row, hyper in enumerate(hypers)}
    tasks = [task for stack in round_.stacks for task in stack.tasks]
    if any(compute_dtype(stack.tasks[0].work) is torch.float64 for stack in round_.stacks):
        raise LayoutError("the triton backend cannot sweep torch.float64; use backend='torch'")

    def kind(task: Task) -> tuple[int, bool, bool]:
        return rows[id(task.hyper)], task.work.main is None, task.work.out is None

    parts = []
    for (row, _, _), batch in groupby(tasks, kind):
        parts.append((row, in_columns([task.work for task in batch])))
    places = []
    for stack in round_.stacks:
        places.append((stack.begin, stack.first_slot, stack.slots, len(stack.tasks)))
    cutting = Cutting((round_.inputs[:2], tuple(places)), partial(_runs_of, round_, codec.block))
    found = cut_sweeps(parts, {MOMENTUM: codec}, cutting)
    if found is None:
        raise LayoutError(
            "a matrix, its momentum or its remainder is not contiguous, and has no triton version; make the parameter "
            "contiguous, or pass backend='torch'"
        )
    return found


def _runs_of(round_: Round, block: int, work: int, numel: int) -> Iterator[Cut]:
    """The runs of one work of the round, slot by slot. `block`: of momentum codes that share a scale."""
    stack, number = round_.place_of(work)
    item_bytes = round_.inputs.dtype.itemsize
    begin_of_work = stack.begin + number * numel
    for index, slot in enumerate(stack.slots, stack.first_slot + number * len(stack.slots)):
        for begin, length in slot.runs:
            if block and begin % block:
                raise LayoutError(
                    f"matrices of {length} elements within one parameter share blocks of {block} momentum codes; "
                    "pass momentum_buffer_dtype=torch.float32 or torch.bfloat16, or backend='torch'"
                )
            first = begin_of_work + begin
            yield Cut(work, begin, length, first, index, first * item_bytes)


class Range(NamedTuple):
    """The chunks of a slot in one sweep."""

    slot: int
    begin: int
    end: int


@lru_cache(maxsize=CALLS)
def ranges(cuts: tuple[Cut, ...], chunk: int) -> tuple[Range, ...]:
    """The range of chunks of each slot. The runs of a slot are consecutive."""
    found: list[Range] = []
    end = 0
    for slot, of_slot in groupby(cuts, lambda cut: cut.tag):
        begin = end
        end = end + sum(-(-cut.numel // chunk) for cut in of_slot)
        found.append(Range(slot, begin, end))
    return tuple(found)


def bounds(of_sweeps: tuple[tuple[Range, ...], ...], num_slots: int, device: torch.device) -> Tensor:
    """(slots, 2) int64: first and last + 1 chunk of each slot, counted over all sweeps."""

    def build() -> Tensor:
        host = torch.zeros(num_slots, 2, dtype=torch.int64, device="cpu")
        before = 0
        for of_sweep in of_sweeps:
            for slot, begin, end in of_sweep:
                host[slot, 0] = before + begin
                host[slot, 1] = before + end
            before += of_sweep[-1].end
        return to_device(host, device)

    return known_tables(device).get((of_sweeps, num_slots), build)


def factors_on(device: torch.device, round_: Round) -> Tensor:
    """The factor of every slot of the round, (slots,) float32."""
    of_slots: list[float] = []
    for stack in round_.stacks:
        of_slots += [slot.factor for slot in stack.slots] * len(stack.tasks)

    def build() -> Tensor:
        return to_device(torch.tensor(of_slots, dtype=torch.float32, device="cpu"), device)

    return known_tables(device).get(tuple(of_slots), build)


@cache
def known_tables(device: torch.device) -> DeviceTables[Tensor]:
    """Tables of rounds on `device`, except their chunk tables."""
    return DeviceTables(device, capacity=2 * CALLS)
