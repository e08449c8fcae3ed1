"""The statistics of a step: norms, overflow, zeros; each element counted once over all ranks, in one reduction."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from opt_distributed.comm.collectives import Comm
from opt_distributed.step.sources import Source
from opt_distributed.step.unit import Ready
from opt_kernels.ops.grad_stats import grad_stats


class Stats(NamedTuple):
    """What all ranks know of this step's gradients, as one rank alone would have found it."""

    norms: tuple[float, ...]  # L2, one for each norm slot, of the mean gradient; loss scale still in
    num_nonfinite: int
    num_zeros: int

    @property
    def overflow(self) -> bool:
        """Whether an element is infinite or NaN, or a norm is: nothing may be updated from such gradients."""
        return self.num_nonfinite > 0 or not all(map(math.isfinite, self.norms))


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Sources whose parameters live on the same ranks: dense ones, or the experts.

    Its elements are spread over `dp` (shards or replicas) and `mp` (tensor and pipeline stages); a sum over both, of
    what each rank counts, is over the whole model.
    """

    sources: Sequence[Source]
    dp: Comm
    mp: Comm
    device: torch.device


def reduce_stats(
    families: Sequence[Family],
    ready: Iterable[Ready],
    *,
    num_slots: int,
    count_zeros: bool,
) -> Stats:
    """One all-reduce a family over its data-parallel ranks, one more over model-parallel ranks where there are any.

    The first also carries the sources' flags. Everything is summed in float64.
    """
    counted = _by_source(ready)
    totals = [_family_total(f, counted, num_slots=num_slots, count_zeros=count_zeros) for f in families]
    total = torch.stack([t.cpu() for t in totals]).sum(0).tolist()  # the step's one host read
    *squares, nonfinite, zeros = total
    norms = [math.sqrt(s) if s >= 0 else math.nan for s in squares]
    if nonfinite:
        norms = [n if not math.isfinite(n) else math.inf for n in norms]
    return Stats(tuple(norms), int(nonfinite), int(zeros))


def reduce_norm(families: Sequence[Family], ready: Iterable[Ready], *, norm_type: float, slot: int) -> float:
    """The `norm_type`-norm of one slot's mean gradient over the whole model, loss scale still in; NaN or infinite where
    an element is. Every rank calls it: two small exchanges a family.

    Raises:
        ValueError: `norm_type` is not above 0.
    """
    counted = _by_source(ready)
    powers = [_power(family, counted, norm_type=norm_type, slot=slot) for family in families]
    return _largest(powers) if math.isinf(norm_type) else sum(powers) ** (1.0 / norm_type)


Counted = Mapping[Source, Mapping[int, list[Tensor]]]
"""The gradients that this rank counts, by source and norm slot."""


def _by_source(ready: Iterable[Ready]) -> Counted:
    found: dict[Source, dict[int, list[Tensor]]] = {}
    for pieces, grads in ready:
        for piece, grad in zip(pieces, grads, strict=True):
            if piece.counted:
                found.setdefault(piece.source, {}).setdefault(piece.norm_slot, []).append(grad)
    return found


def _family_total(family: Family, counted: Counted, *, num_slots: int, count_zeros: bool) -> Tensor:
    """(num_slots + 2,) float64: sums of squares, non-finite elements, zeros; and the sources are settled."""
    mine = torch.zeros(num_slots + 2, dtype=torch.float64, device=family.device)
    for source in family.sources:
        for slot, grads in counted.get(source, {}).items():
            _add_sweep_(mine, grads, slot=slot, scale=source.grad_scale, count_zeros=count_zeros)
    flags = [source.flags().to(family.device) for source in family.sources]
    joined = torch.cat([mine, *flags])
    family.dp.all_reduce_(joined)
    total, *summed = torch.split(joined, [mine.numel(), *(f.numel() for f in flags)])
    for source, of_source in zip(family.sources, summed, strict=True):
        source.settle_(of_source)
    total = total.contiguous()
    family.mp.all_reduce_(total)
    return total


def _add_sweep_(mine: Tensor, grads: list[Tensor], *, slot: int, scale: float, count_zeros: bool) -> None:
    found = grad_stats(grads, count_zeros=count_zeros)
    mine[slot] += found.sum_of_squares.to(mine.device) * scale**2
    mine[-2] += found.nonfinite.to(mine.device)
    mine[-1] += found.zeros.to(mine.device)


def _power(family: Family, counted: Counted, *, norm_type: float, slot: int) -> float:
    """The sum of |g|^norm_type over the family's ranks; for infinity the largest |g|."""
    mine = []
    for source in family.sources:
        found = grad_stats(counted.get(source, {}).get(slot, []), count_zeros=False, norm_type=norm_type)
        scale = source.grad_scale if math.isinf(norm_type) else source.grad_scale**norm_type
        mine.append(float(found.sum_of_squares) * scale)
    if math.isinf(norm_type):
        of_replicas = _largest(family.dp.gather_objects(_largest(mine)))
        return _largest(family.mp.gather_objects(of_replicas))
    total = torch.tensor(sum(mine), dtype=torch.float64, device=family.device)
    family.dp.all_reduce_(total)
    family.mp.all_reduce_(total)
    return float(total)


def _largest(values: Sequence[float]) -> float:
    """NaN where one is; 0 of none. The builtin would drop a NaN or not, depending on its place."""
    return math.nan if any(map(math.isnan, values)) else max(values, default=0.0)
