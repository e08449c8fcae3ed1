"""What the launches of a round derive from their chunk tables: computed once, as long as these tables are used."""

from bisect import bisect_left
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opt_kernels.backends.triton.multi_tensor import DeviceTables, to_device
from opt_kernels.backends.triton.sweep import CALLS, Cut, Launches, launch_options
from opt_kernels.matrices.muon.rounds import Round, Stack


class Share(NamedTuple):
    """The chunks of one stack in one sweep."""

    sweep: int
    begin: int  # the first of them, in the sweep
    records: Tensor  # (num_chunks, WIDTH) int64
    to_normalise: dict[str, Any]  # arguments of the sweeps over these chunks
    to_descend: dict[str, Any]

    @property
    def num_chunks(self) -> int:
        return self.records.shape[0]


class RoundTables(NamedTuple):
    """Tables and scratch memory of a round, on the device of its tensors."""

    sums: Tensor  # (chunks of all sweeps,) float64, scratch
    sums_of_sweeps: tuple[Tensor, ...]  # views of `sums`
    totals: Tensor  # (slots,) float64, scratch
    bounds: Tensor  # (slots, 2) int64: first and last + 1 chunk of each slot, counted over all sweeps
    factors: Tensor  # (slots,) float32
    shares: dict[int, list[Share]]  # by the first slot of each stack


def tables_of(one: Round, launches: Launches, device: torch.device) -> RoundTables:
    """The tables of a round with these launches, which are those of equal rounds only."""
    found: RoundTables | None = launches.derived.get(tables_of)
    if found is None:
        found = launches.derived[tables_of] = _made(one, launches, device)
    return found


def _made(one: Round, launches: Launches, device: torch.device) -> RoundTables:
    of_sweeps = tuple([ranges(sweep.cuts, sweep.table.chunk) for sweep in launches])
    counts = [sweep.table.num_chunks for sweep in launches]
    sums = torch.empty(sum(counts), dtype=torch.float64, device=device)
    return RoundTables(
        sums=sums,
        sums_of_sweeps=torch.split(sums, counts),
        totals=torch.empty(one.num_slots, dtype=torch.float64, device=device),
        bounds=bounds(of_sweeps, one.num_slots, device),
        factors=factors_on(device, one),
        shares={stack.first_slot: _shares(stack, launches, of_sweeps) for stack in one.stacks},
    )


def _shares(stack: Stack, launches: Launches, of_sweeps: Sequence[Sequence["Range"]]) -> list[Share]:
    wanted, shares = stack.slots_of_all, []
    for number, (sweep, of_slots) in enumerate(zip(launches, of_sweeps)):
        first, stop = (bisect_left(of_slots, (slot,)) for slot in (wanted.start, wanted.stop))
        if first < stop:
            begin, end = of_slots[first].begin, of_slots[stop - 1].end
            options = launch_options(sweep.formats, sweep.table)
            shares.append(
                Share(
                    number,
                    begin,
                    sweep.table.records[begin:end],
                    {name: options[name] for name in (*_OF_ALL, *_OF_COMPILER)},
                    {name: options[name] for name in (*_OF_ALL, "MAIN", "OUT", "REMAINDER", *_OF_COMPILER)},
                )
            )
    return shares


_OF_ALL = ("WIDTH", "CHUNK", "BLOCK", "E")
_OF_COMPILER = ("num_warps", "enable_fp_fusion")


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
        begin, end = end, end + sum(-(-cut.numel // chunk) for cut in of_slot)
        found.append(Range(slot, begin, end))
    return tuple(found)


def bounds(of_sweeps: tuple[tuple[Range, ...], ...], num_slots: int, device: torch.device) -> Tensor:
    """(slots, 2) int64: first and last + 1 chunk of each slot, counted over all sweeps."""

    def build() -> Tensor:
        host = torch.zeros(num_slots, 2, dtype=torch.int64)
        before = 0
        for of_sweep in of_sweeps:
            for slot, begin, end in of_sweep:
                host[slot] = torch.tensor((before + begin, before + end))
            before += of_sweep[-1].end
        return to_device(host, device)

    return known_tables(device).get((of_sweeps, num_slots), build)


def factors_on(device: torch.device, one: Round) -> Tensor:
    """The factor of every slot of the round, (slots,) float32."""
    of_stacks = tuple([(len(stack.tasks), tuple([slot.factor for slot in stack.slots])) for stack in one.stacks])

    def build() -> Tensor:
        of_slots = [factor for num_works, factors in of_stacks for factor in factors * num_works]
        return to_device(torch.tensor(of_slots, dtype=torch.float32), device)

    return known_tables(device).get(of_stacks, build)


@cache
def known_tables(device: torch.device) -> DeviceTables[Tensor]:
    """Tables of rounds on `device`, except their chunk tables."""
    return DeviceTables(device, capacity=2 * CALLS)
