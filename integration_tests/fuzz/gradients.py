"""Weights and gradients of a case: exact numbers that every rank can make for itself. Torch and the standard library
only.

Gradients are small integers over a power of two, times the odd part of the number of replicas. So every sum over
microbatches and ranks and every mean is exact in fp16, bf16 and fp32, in any order, and what is left to tolerate is the
rounding of the norm and of the rule.
"""

import zlib

import torch
from torch import Tensor

from fuzz.cases import Bad, Case, Param, Place, Setup, cut_of, is_copy, num_replicas, replica_of

UNIT = 1 / 64
TOP = 255  # integers up to here are exact in bf16


def first_weight(case: Case, param: Param) -> Tensor:
    """The whole parameter before the first step, float64, exact in its dtype."""
    values = torch.rand(param.shape, generator=_generator(case.seed, "weight", param.name)) - 0.5
    return values.to(case.dtype_of(param, case.setup)).double()


def gradient(case: Case, param: Param, *, step: int, microbatch: int, replica: int, tp: int, is_copy: bool) -> Tensor:
    """What one replica's microbatch adds to the whole parameter's gradient, float64.

    `tp`: the tensor-parallel rank; it matters only where the gradient differs between them (`over_tp`). `is_copy`: of
    the second copy of a tied parameter.
    """
    setup = case.setup_at(step)
    odd = setup.grid.dp // (setup.grid.dp & -setup.grid.dp)
    parts = setup.grid.tp if param.over_tp else 1
    terms = num_replicas(param, setup.grid) * setup.microbatches * odd * parts * (1 + param.tied)
    largest = max(TOP // terms, 1)
    key = (case.seed, "gradient", param.name, step, microbatch, replica, tp if param.over_tp else 0, is_copy)
    values = torch.randint(-largest, largest + 1, param.shape, generator=_generator(*key))
    present = torch.rand(param.shape, generator=_generator(case.seed, "zeros", param.name, step)) >= case.zero_share
    return values * present * odd * UNIT


def part(value: Tensor, param: Param, place: Place, setup: Setup) -> Tensor:
    """The part of a whole parameter, or of its gradient, that a rank holds."""
    index, count = cut_of(param, place, setup.grid)
    return value if count == 1 or param.cut is None else value.chunk(count, param.cut)[index]


def kept_part(value: Tensor, param: Param, place: Place, setup: Setup) -> Tensor:
    """What a rank shows of a whole parameter: its part, or all of it where DTensors can be gathered."""
    return value if setup.layout != "plain" else part(value, param, place, setup)


def local_gradient(case: Case, param: Param, rank: int, *, step: int, microbatch: int) -> Tensor:
    """This rank's gradients after backward, with the case's faults."""
    setup = case.setup_at(step)
    place = setup.grid.place(rank)
    at = {"replica": replica_of(param, place), "tp": place.tp, "is_copy": is_copy(param, place)}
    whole = gradient(case, param, step=step, microbatch=microbatch, **at)
    found = part(whole, param, place, setup).contiguous()
    for bad in case.bad:
        if is_meant(bad, param, rank, step=step, microbatch=microbatch) and found.numel():
            found = found.clone()
            found.view(-1)[found.numel() // 2] = bad.value
    return found


def is_meant(bad: Bad, param: Param, rank: int, *, step: int, microbatch: int) -> bool:
    return (bad.param, bad.rank, bad.step, bad.microbatch) == (param.name, rank, step, microbatch)


def tokens(case: Case, step: int, replica: int) -> int:
    """In the losses of one replica's iteration. Together they are a power of two, so that the mean is exact."""
    replicas = case.setup_at(step).grid.dp
    each = [1 + (3 * step + 5 * other) % 7 for other in range(replicas)]
    each[-1] += (1 << (sum(each) - 1).bit_length()) - sum(each)
    return each[replica]


def _generator(*key: object) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
