"""Tables of a round on its device that depend on sizes alone: the chunks of every slot, and its factor."""

from functools import cache, lru_cache
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from opt_kernels.backends.tables import DeviceTables, to_device
from opt_kernels.backends.triton.launches import CALLS, Cut
from opt_kernels.matrices.muon.rounds import Round


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


def factors_on(device: torch.device, round_: Round) -> Tensor:
    """The factor of every slot of the round, (slots,) float32."""
    of_stacks = tuple([(len(stack.tasks), tuple([slot.factor for slot in stack.slots])) for stack in round_.stacks])

    def build() -> Tensor:
        of_slots = [factor for num_works, factors in of_stacks for factor in factors * num_works]
        return to_device(torch.tensor(of_slots, dtype=torch.float32), device)

    return known_tables(device).get(of_stacks, build)


@cache
def known_tables(device: torch.device) -> DeviceTables[Tensor]:
    """Tables of rounds on `device`, except their chunk tables."""
    return DeviceTables(device, capacity=2 * CALLS)
