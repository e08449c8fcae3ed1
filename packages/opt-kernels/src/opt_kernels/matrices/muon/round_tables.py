"""What the launches of a round derive from their chunk tables: computed once, as long as these tables are used."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opt_kernels.backends.tables import DeviceTables, to_device
from opt_kernels.backends.triton.formats import triton_dtype
from opt_kernels.backends.triton.launches import CALLS, Cut, Launches, launch_options
from opt_kernels.backends.triton.multi_tensor import ChunkTable
from opt_kernels.backends.triton.quantize import GROUP, scheme
from opt_kernels.codecs import StateCodec
from opt_kernels.matrices.muon.rounds import Round, Stack


class MomentumSweep(NamedTuple):
    """The sweep over all works of one combination of dtypes."""

    grid: tuple[int]
    table: ChunkTable
    sums: Tensor  # (num_chunks,) float64, a view of `RoundTables.sums`
    num_scales: int  # of u
    options: dict[str, Any]


class Share(NamedTuple):
    """The chunks of one stack in one sweep."""

    sweep: int
    first_scale: int  # of the first of them, among the scales of the sweep
    grid: tuple[int]
    records: Tensor  # (num_chunks, WIDTH) int64
    to_normalise: dict[str, Any]  # arguments of the sweeps over these chunks
    to_descend: dict[str, Any]


class RoundTables(NamedTuple):
    """Tables, arguments and scratch memory of a round, on the device of its tensors."""

    u: torch.dtype
    sums: Tensor  # (chunks of all sweeps,) float64, scratch
    totals: Tensor  # (slots,) float64, scratch
    bounds: Tensor  # (slots, 2) int64: first and last + 1 chunk of each slot, counted over all sweeps
    factors: Tensor  # (slots,) float32
    momentum_sweeps: list[MomentumSweep]
    shares: dict[int, list[Share]]  # by the first slot of each stack


def tables_of(round_: Round, launches: Launches, codec: StateCodec) -> RoundTables:
    """The tables of a round with these launches, which are those of equal rounds with this codec only."""
    found: RoundTables | None = launches.derived.get(tables_of)
    if found is None:
        found = launches.derived[tables_of] = _made(round_, launches, codec)
    return found


def _made(round_: Round, launches: Launches, codec: StateCodec) -> RoundTables:
    device, x = launches[0].table.grads.device, round_.inputs.dtype
    # fp16 cannot hold values that are not normalised; with a power of two per 128 elements it keeps their precision.
    is_narrow = round_.inputs.normalised and x.itemsize == 2
    u, scheme_of_u = (torch.float16, "half") if is_narrow else (x, "plain")
    of_sweeps = tuple([ranges(sweep.cuts, sweep.table.chunk) for sweep in launches])
    counts = [sweep.table.num_chunks for sweep in launches]
    scales = [sweep.table.chunk // GROUP.value if is_narrow else 0 for sweep in launches]  # of a chunk
    sums = torch.empty(sum(counts), dtype=torch.float64, device=device)
    of_momenta = {
        "MOMENTUM": triton_dtype(codec.dtype), "SCHEME": scheme(codec), "U": triton_dtype(u), "SCHEME_U": scheme_of_u,
    }  # fmt: skip
    tag = 4 if codec.block else 3  # the lane of a record that holds the number of its slot
    of_u = {"TAG": tag, "X": triton_dtype(x), "SCHEME_U": scheme_of_u}
    return RoundTables(
        u=u,
        sums=sums,
        totals=torch.empty(round_.num_slots, dtype=torch.float64, device=device),
        bounds=bounds(of_sweeps, round_.num_slots, device),
        factors=factors_on(device, round_),
        momentum_sweeps=[
            MomentumSweep((n,), launch.table, part, n * of_chunk, of_momenta | launch_options(*launch[:2]))
            for launch, part, n, of_chunk in zip(launches, torch.split(sums, counts), counts, scales)
        ],
        shares={stack.first_slot: list(_shares(stack, launches, of_sweeps, scales, of_u)) for stack in round_.stacks},
    )


def _shares(
    stack: Stack,
    launches: Launches,
    of_sweeps: Sequence[Sequence["Range"]],
    scales: Sequence[int],  # of a chunk of each sweep
    of_u: Mapping[str, Any],
) -> Iterator[Share]:
    wanted = stack.slots_of_all
    for number, (sweep, of_slots) in enumerate(zip(launches, of_sweeps)):
        first, stop = (bisect_left(of_slots, (slot,)) for slot in (wanted.start, wanted.stop))
        if first < stop:
            begin, end = of_slots[first].begin, of_slots[stop - 1].end
            options = launch_options(sweep.formats, sweep.table)
            common = {name: options[name] for name in _OF_ALL}
            of_mains = {name: options[name] for name in ("MAIN", "OUT", "REMAINDER")} | {"TAG": of_u["TAG"]}
            records = sweep.table.records[begin:end]
            yield Share(number, begin * scales[number], (end - begin,), records, {**common, **of_u}, common | of_mains)


_OF_ALL = ("WIDTH", "CHUNK", "BLOCK", "E", "num_warps", "enable_fp_fusion")


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
