"""The statistics of a step: norms, overflow, zeros, each element counted once over all ranks, in one small reduction."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from opt_distributed.comm.collectives import Comm
from opt_distributed.step.sources import Source
from opt_distributed.step.unit import ReadyPiece
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
    ready: Sequence[ReadyPiece],
    *,
    num_slots: int,
    count_zeros: bool,
) -> Stats:
    """One all-reduce a family over its data-parallel ranks, one more over model-parallel ranks where there are any.

    The first also carries the sources' flags. Everything is summed in float64.
    """
    totals = [_family_total(f, ready, num_slots=num_slots, count_zeros=count_zeros) for f in families]
    total = torch.stack([t.cpu() for t in totals]).sum(0).tolist()  # the step's one host read
    *squares, nonfinite, zeros = total
    norms = [math.sqrt(s) if s >= 0 else math.nan for s in squares]
    if nonfinite:
        norms = [n if not math.isfinite(n) else math.inf for n in norms]
    return Stats(tuple(norms), int(nonfinite), int(zeros))


def _family_total(family: Family, ready: Sequence[ReadyPiece], *, num_slots: int, count_zeros: bool) -> Tensor:
    """(num_slots + 2,) float64: sums of squares, non-finite elements, zeros; and the sources are settled."""
    mine = torch.zeros(num_slots + 2, dtype=torch.float64, device=family.device)
    for source in family.sources:
        for slot in range(num_slots):
            grads = [
                r.grad for r in ready if r.piece.source is source and r.piece.norm_slot == slot and r.piece.counted
            ]
            _add_sweep_(mine, grads, slot=slot, scale=source.grad_scale, count_zeros=count_zeros)
    flags = [source.flags().to(family.device) for source in family.sources]
    joined = torch.cat([mine, *flags])
    family.dp.all_reduce_(joined)
    total, *summed = joined.split([mine.numel(), *(f.numel() for f in flags)])
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
