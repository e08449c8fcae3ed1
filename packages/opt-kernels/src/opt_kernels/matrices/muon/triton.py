"""Muon's elementwise parts as Triton sweeps over the chunk table: the momenta of all matrices in one launch.

Bytes per element in float32 with a bf16 copy of the weight: 14 for the momentum and the matrix u to orthogonalise, 4
for the normalisation of u, 12 for the update. `kernels/muon.md` derives the design.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from opt_kernels.backends.tables import launching_on
from opt_kernels.backends.triton import jit, jit_once, scalars, tl
from opt_kernels.backends.triton.formats import ALIGNMENT, triton_dtype
from opt_kernels.backends.triton.lanes import decayed, load, nearest, pointer, read_main, store, write_main
from opt_kernels.backends.triton.launches import Launches, launch_options
from opt_kernels.backends.triton.quantize import GROUP, no_outlier, read_state, scheme, write_state
from opt_kernels.codecs import StateCodec
from opt_kernels.matrices.muon import MOMENTUM, Decay
from opt_kernels.matrices.muon.rounds import (
    Round,
    Stack,
    bounds,
    factors_on,
    ranges,
    rounds,
    swept,
    with_ordered_grads,
)
from opt_kernels.works import Batch, Scalar, Skip

SUM_BLOCK = 1024  # chunks that are added at a time
LANES: tl.constexpr = tl.constexpr(4)  # neighbours that one thread has in every layout


@jit
def along(base: tl.tensor, first: tl.tensor, E: tl.constexpr) -> tl.tensor:
    """Pointer to the element at index `first` (int64) of a buffer, with a hint that it is aligned to `E` elements."""
    BITS: tl.constexpr = base.dtype.element_ty.primitive_bitwidth
    return tl.multiple_of(base + first, E * (BITS // 8))


@jit
def momentum_tile(
    main: tl.tensor, out: tl.tensor, grad: tl.tensor, momentum: tl.tensor, momentum_scale: tl.tensor,
    u: tl.tensor, u_scale: tl.tensor, row: tl.tensor, start: tl.tensor, n: tl.tensor,
    MOMENTUM: tl.constexpr, SCHEME: tl.constexpr, U: tl.constexpr, SCHEME_U: tl.constexpr,
    NESTEROV: tl.constexpr, DECAY: tl.constexpr,
    REMAINDER: tl.constexpr, IEEE: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Update the momenta of BLOCK elements of one chunk, write their u, and return its squares."""
    at = start + tl.arange(0, BLOCK)
    g = load(grad, at, n, FULL).to(tl.float32) * tl.load(row + scalars.GRAD_SCALE)
    if DECAY == "l2":
        g = decayed(g, tl.load(row + scalars.WEIGHT_DECAY), read_main(main, out, at, n, REMAINDER, FULL))
    mu = tl.load(row + scalars.MOMENTUM)
    m = read_state(momentum, momentum_scale, start, n, BLOCK, SCHEME, True, IEEE, FULL)
    m += (1.0 - mu) * (g - m)
    x = g + mu * (m - g) if NESTEROV else m
    # Added within a thread, and u written before the momentum: with 8-bit codes, the registers saved let another
    # program run at the same time.
    squares = tl.sum(tl.reshape(x * x, (BLOCK // LANES, LANES)), axis=1)
    write_state(u, u_scale, x, None, start, n, U, BLOCK, SCHEME_U, True, IEEE, False, FULL)
    if SCHEME != "plain":
        m = tl.where(no_outlier(m, SCHEME, True), m, 0.0)
    write_state(momentum, momentum_scale, m, None, start, n, MOMENTUM, BLOCK, SCHEME, True, IEEE, True, FULL)
    return squares


@jit_once(addresses=["sums"])  # the part of one launch, which may begin at any address
def momentum_sweep(
    records: tl.tensor,  # (chunks, WIDTH) int64: main or remainder, out, momentum, its scales ... n, row, place in u
    grads: tl.tensor,  # (chunks,) int64
    block: tl.tensor,  # (rows, 8) float32
    u: tl.tensor,  # all matrices of the round, written
    u_scales: tl.tensor,  # (chunks, CHUNK / 128) float32, written where SCHEME_U has scales
    sums: tl.tensor,  # (chunks,) float64, written: of the squares of u
    GRAD: tl.constexpr, MAIN: tl.constexpr, OUT: tl.constexpr, MOMENTUM: tl.constexpr, SCHEME: tl.constexpr,
    U: tl.constexpr, SCHEME_U: tl.constexpr, NESTEROV: tl.constexpr, DECAY: tl.constexpr,
    REMAINDER: tl.constexpr, IEEE: tl.constexpr,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, E: tl.constexpr,
) -> None:  # fmt: skip
    """One program per chunk. If the scalar block marks the step as skipped, it writes only a sum of zero."""
    chunk = tl.program_id(0)
    record = records + chunk * WIDTH
    main = pointer(tl.load(record + 0), MAIN, E)
    out = pointer(tl.load(record + 1), tl.int16 if REMAINDER else (MAIN if OUT is None else OUT), E)
    momentum = pointer(tl.load(record + 2), MOMENTUM, E)
    momentum_scale = pointer(tl.load(record + 3), tl.float32, 1)
    grad = pointer(tl.load(grads + chunk), GRAD, E)
    row = block + tl.load(record + WIDTH - 2) * scalars.WIDTH
    u = along(u, tl.load(record + WIDTH - 1), E)
    u_scale = u_scales + chunk.to(tl.int64) * (CHUNK // GROUP)
    n = tl.where(tl.load(row + scalars.PROCEED) != 0.0, tl.load(record + WIDTH - 3), 0).to(tl.int32)
    total = tl.zeros((BLOCK // LANES,), dtype=tl.float32)
    if n == CHUNK:
        for start in range(0, CHUNK, BLOCK):
            total += momentum_tile(
                main, out, grad, momentum, momentum_scale, u, u_scale, row, start, n,
                MOMENTUM, SCHEME, U, SCHEME_U, NESTEROV, DECAY, REMAINDER, IEEE, BLOCK, True,
            )  # fmt: skip
    else:
        for start in range(0, n, BLOCK):
            total += momentum_tile(
                main, out, grad, momentum, momentum_scale, u, u_scale, row, start, n,
                MOMENTUM, SCHEME, U, SCHEME_U, NESTEROV, DECAY, REMAINDER, IEEE, BLOCK, False,
            )  # fmt: skip
    tl.store(sums + chunk, tl.sum(total, axis=0).to(tl.float64))


@jit
def slot_totals(
    sums: tl.tensor,  # (chunks,) float64
    bounds: tl.tensor,  # (slots, 2) int64: the chunks of a matrix, from and to
    totals: tl.tensor,  # (slots,) float64, written
    BLOCK: tl.constexpr,
) -> None:
    """Add the chunks of each matrix, one program per matrix, always in the same order."""
    slot = tl.program_id(0)
    end = tl.load(bounds + slot * 2 + 1)
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(tl.load(bounds + slot * 2), end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(sums + at, mask=at < end, other=0.0)
    tl.store(totals + slot, tl.sum(total, axis=0))


@jit
def normalised_tile(
    u: tl.tensor, u_scale: tl.tensor, x: tl.tensor, inverse: tl.tensor, start: tl.tensor, n: tl.tensor,
    X: tl.constexpr, SCHEME_U: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr,
) -> None:  # fmt: skip
    """x = u / norm for BLOCK elements of one chunk."""
    value = read_state(u, u_scale, start, n, BLOCK, SCHEME_U, True, True, FULL) * inverse
    store(x, start + tl.arange(0, BLOCK), n, nearest(value, X), FULL)


@jit
def normalise_sweep(
    records: tl.tensor,  # those of `momentum_sweep`, of some chunks; the slot is after the addresses
    u: tl.tensor,
    u_scales: tl.tensor,  # from the first of these chunks on
    x: tl.tensor,  # written; may be the memory of u, element for element
    totals: tl.tensor,  # (slots,) float64
    smallest: float,  # norm that a matrix is divided by
    X: tl.constexpr, SCHEME_U: tl.constexpr, TAG: tl.constexpr,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, E: tl.constexpr,
) -> None:  # fmt: skip
    """One program per chunk."""
    chunk = tl.program_id(0)
    record = records + chunk * WIDTH
    first = tl.load(record + WIDTH - 1)
    u = along(u, first, E)
    x = along(x, first, E)
    u_scale = u_scales + chunk.to(tl.int64) * (CHUNK // GROUP)
    norm = tl.sqrt_rn(tl.load(totals + tl.load(record + TAG)).to(tl.float32))
    inverse = tl.div_rn(1.0, tl.maximum(norm, smallest))
    n = tl.load(record + WIDTH - 3).to(tl.int32)
    if n == CHUNK:
        for start in range(0, CHUNK, BLOCK):
            normalised_tile(u, u_scale, x, inverse, start, n, X, SCHEME_U, BLOCK, True)
    else:
        for start in range(0, n, BLOCK):
            normalised_tile(u, u_scale, x, inverse, start, n, X, SCHEME_U, BLOCK, False)


@jit
def descent_tile(
    main: tl.tensor, out: tl.tensor, direction: tl.tensor, factor: tl.tensor,
    row: tl.tensor, start: tl.tensor, n: tl.tensor, first: tl.tensor,
    MAIN: tl.constexpr, OUT: tl.constexpr, DECAY: tl.constexpr,
    REMAINDER: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr,
) -> None:  # fmt: skip
    """Update BLOCK elements of one chunk, from `start` on."""
    at = start + tl.arange(0, BLOCK)
    p = read_main(main, out, at, n, REMAINDER, FULL)
    if DECAY == "decoupled":
        p *= 1.0 - tl.load(row + scalars.LR_DECAY)  # a product: an infinite weight stays infinite
    if DECAY == "independent":
        p *= 1.0 - tl.load(row + scalars.WEIGHT_DECAY)
    p -= tl.load(row + scalars.LR) * (factor * load(direction, at, n, FULL).to(tl.float32))
    write_main(main, out, p, at, n, first, 0, MAIN, OUT, REMAINDER, False, FULL)


@jit
def descent_sweep(
    records: tl.tensor,  # those of `momentum_sweep`, of some chunks
    block: tl.tensor,  # (rows, 8) float32
    directions: tl.tensor,  # of the matrices of one stack
    origin: tl.tensor,  # place of that stack in u
    factors: tl.tensor,  # (slots,) float32
    MAIN: tl.constexpr, OUT: tl.constexpr, DECAY: tl.constexpr, REMAINDER: tl.constexpr, TAG: tl.constexpr,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, E: tl.constexpr,
) -> None:  # fmt: skip
    """One program per chunk. It writes nothing if the scalar block marks the step as skipped."""
    chunk = tl.program_id(0)
    record = records + chunk * WIDTH
    main = pointer(tl.load(record + 0), MAIN, E)
    out = pointer(tl.load(record + 1), tl.int16 if REMAINDER else (MAIN if OUT is None else OUT), E)
    row = block + tl.load(record + WIDTH - 2) * scalars.WIDTH
    first = tl.load(record + WIDTH - 1)
    direction = along(directions, first - origin, E)
    factor = tl.load(factors + tl.load(record + TAG))
    n = tl.where(tl.load(row + scalars.PROCEED) != 0.0, tl.load(record + WIDTH - 3), 0).to(tl.int32)
    if n == CHUNK:
        for start in range(0, CHUNK, BLOCK):
            descent_tile(main, out, direction, factor, row, start, n, first,
                         MAIN, OUT, DECAY, REMAINDER, BLOCK, True)  # fmt: skip
    else:
        for start in range(0, n, BLOCK):
            descent_tile(main, out, direction, factor, row, start, n, first,
                         MAIN, OUT, DECAY, REMAINDER, BLOCK, False)  # fmt: skip


def in_phases_(batches: Sequence[Batch], rule: Any, *, grad_scale: Scalar = 1.0, skip: Skip = None) -> None:
    """Same as `rules.whole_matrices.in_phases_` for `MuonRule` or `AdaptiveMuonRule`, on the device of the tensors,
    without synchronizing; CUDA graphs may capture it.

    There is one momentum launch per combination of dtypes, and one update launch per stack. `transform_` receives
    matrices in the format that `rule.inputs` returns. Raises LayoutError for a dtype that Triton cannot sweep or a
    matrix that is not contiguous, and FrozenHyperError for host numbers in a capture.
    """
    muon = getattr(rule, "muon", rule)  # whose momentum and scales these are
    codec = muon.codecs[MOMENTUM]
    decay = muon.weight_decay_method
    batches = with_ordered_grads(batches)  # tables hold only addresses: copies live until the last launch
    hypers = [hyper for hyper, _ in batches]
    blocks: dict[torch.device, Tensor] = {}
    for round_ in rounds(batches, rule.inputs, muon.scales):
        launches = swept(round_, hypers, codec)
        device = launches[0].table.grads.device
        with launching_on(device):
            if device not in blocks:  # equal in all rounds
                blocks[device] = scalars.scalar_block(hypers, grad_scale=grad_scale, skip=skip, device=device)
            block = blocks[device]
            u = _Inputs(round_, launches, codec)
            u.accumulate_(block, nesterov=muon.nesterov, decay=decay)
            for stack in round_.stacks:
                given = u.normalised(stack)
                if round_.inputs.normalised:
                    directions = rule.transform_(stack.tasks, given, skip, normalised=True)
                else:
                    directions = rule.transform_(stack.tasks, given, skip)
                for task, direction in zip(stack.tasks, directions):
                    rule.adapt_(task, direction, skip)
                directions = directions.contiguous()
                if directions.data_ptr() % ALIGNMENT:  # a slice of a gathered matrix may begin anywhere
                    directions = directions.clone()
                u.descend_(stack, directions, block, decay=decay)


class _Inputs:
    """The matrices u to be orthogonalised in a round, and the launches that write and read them."""

    def __init__(self, round_: Round, launches: Launches, codec: StateCodec) -> None:
        device = launches[0].table.grads.device
        x = round_.inputs.dtype
        # fp16 cannot hold values that are not normalised; with a power of two per 128 elements it keeps their
        # precision.
        is_narrow = round_.inputs.normalised and x.itemsize == 2
        self._wanted = round_.inputs
        self._launches = launches
        self._codec = codec
        self._x = torch.empty(round_.numel, dtype=x, device=device)
        self._u = self._x.view(torch.float16) if is_narrow else self._x  # x overwrites it, element by element
        self._scheme = "half" if is_narrow else "plain"
        tables = [launch.table for launch in launches]
        self._scales = []  # of the groups of each chunk
        for table in tables:
            width = table.chunk // GROUP.value if is_narrow else 0
            self._scales.append(torch.empty(table.num_chunks, width, dtype=torch.float32, device=device))
        self._sums = torch.empty(sum(table.num_chunks for table in tables), dtype=torch.float64, device=device)
        self._totals = torch.empty(round_.num_slots, dtype=torch.float64, device=device)
        self._ranges = tuple([ranges(launch.cuts, launch.table.chunk) for launch in launches])
        self._bounds = bounds(self._ranges, round_.num_slots, device)
        self._factors = factors_on(device, round_)

    def accumulate_(self, block: Tensor, *, nesterov: bool, decay: Decay) -> None:
        """Update all momenta, write u, and sum its squares for each matrix."""
        u = triton_dtype(self._u.dtype)
        options = {
            "MOMENTUM": triton_dtype(self._codec.dtype),
            "SCHEME": scheme(self._codec),
            "U": u,
            "SCHEME_U": self._scheme,
            "NESTEROV": nesterov,
            "DECAY": decay.value,
        }
        sums = torch.split(self._sums, [launch.table.num_chunks for launch in self._launches])
        for (formats, table, _), scales, of_launch in zip(self._launches, self._scales, sums):
            tensors = (table.records, table.grads, block, self._u, scales, of_launch)
            momentum_sweep[(table.num_chunks,)](*tensors, **options, **launch_options(formats, table))
        if self._wanted.normalised:
            slot_totals[(self._totals.numel(),)](
                self._sums, self._bounds, self._totals, BLOCK=SUM_BLOCK, num_warps=4, enable_fp_fusion=False
            )

    def normalised(self, stack: Stack) -> Tensor:
        """The matrices of `stack`, (len(tasks), *shape), divided by their norms if the inputs are to be normalised."""
        x = self._x
        totals = self._totals
        if self._wanted.normalised:
            if stack.inputs.all_reduce is not None:
                of_slots = totals[stack.slots_of_all]
                of_slots.copy_(stack.inputs.all_reduce(of_slots.clone()))
            formats = {"X": triton_dtype(x.dtype), "SCHEME_U": self._scheme}
            for records, scales, options in self._shares(stack, _OF_ALL):
                arguments = (records, self._u, scales, x, totals, self._wanted.eps)
                normalise_sweep[(len(records),)](*arguments, **formats, **options)
        of_stack = x if stack.numel == x.numel() else x[stack.begin : stack.begin + stack.numel]
        return of_stack.view(len(stack.tasks), *stack.tasks[0].work.grad.shape)

    def descend_(self, stack: Stack, directions: Tensor, block: Tensor, *, decay: Decay) -> None:
        """Update the mains of `stack` along `directions` (len(tasks), *shape)."""
        for records, _, options in self._shares(stack, (*_OF_ALL, "MAIN", "OUT", "REMAINDER")):
            arguments = (records, block, directions, stack.begin, self._factors)
            descent_sweep[(len(records),)](*arguments, DECAY=decay.value, **options)

    def _shares(self, stack: Stack, names: Sequence[str]) -> Iterator[tuple[Tensor, Tensor, dict[str, Any]]]:
        """The chunks of `stack` in each launch that has any: their records, their scales, and its options `names`."""
        wanted = stack.slots_of_all
        for (formats, table, _), of_slots, scales in zip(self._launches, self._ranges, self._scales):
            first, stop = (bisect_left(of_slots, (slot,)) for slot in (wanted.start, wanted.stop))
            if first < stop:
                chunks = slice(of_slots[first].begin, of_slots[stop - 1].end)
                tag = 4 if self._codec.block else 3  # the lane of a record that holds the number of its slot
                options = launch_options(formats, table) | {"TAG": tag}
                yield table.records[chunks], scales[chunks], {name: options[name] for name in names}


_OF_ALL = ("TAG", "WIDTH", "CHUNK", "BLOCK", "E", "num_warps", "enable_fp_fusion")
