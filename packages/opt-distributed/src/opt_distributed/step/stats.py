"""The statistics of a step: norms, overflow, zeros; each element counted once over all ranks, in one reduction."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from opt_distributed.buffers.binding import UnusableGradientError
from opt_distributed.buffers.storage import StorageError
from opt_distributed.buffers.wire import CollectiveError
from opt_distributed.comm.collectives import Comm
from opt_distributed.comm.groups import Axes
from opt_distributed.step.sources import Source
from opt_distributed.step.unit import Ready
from opt_kernels.backends.grad_stats import grad_stats
from opt_paramgroups import ParamId


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
    """Sources whose parameters live on the same ranks: dense ones, or the experts."""

    sources: Sequence[Source]
    axes: Axes

    def is_on_all_of(self, comm: Comm) -> bool:
        """Whether the ranks of `comm` are exactly those that share these parameters."""
        return self.axes.dp.size == comm.size and self.axes.inter.size == 1


def reduce_stats(
    families: Sequence[Family],
    ready: Sequence[Ready],
    *,
    everyone: Comm,
    device: torch.device,
    num_slots: int,
    count_zeros: bool,
    refused: UnusableGradientError | None = None,
    flags: Sequence[float] = (),
    check: Callable[[Sequence[float]], None] = lambda summed: None,
) -> Stats:
    """One all-reduce over all ranks, in float64: each brings what it counts, and no two count the same element.

    It carries the sources' flags too, where all ranks share the parameters; where only some do, these exchange them
    first. Zeros filled in for missing gradients are excluded: each source reports their count next to its flags.

    Norms and zeros count one copy of each element. Finiteness is judged on every copy that may differ: a NaN on a rank
    whose copy is not counted stops the step as well.

    `flags`, as many on every rank, travel along; `check` gets their sums and may raise.

    Raises:
        CollectiveError: a collective failed, or ran into the group's timeout.
        UnusableGradientError: on every rank, if a rank passes `refused`, the reason why its gradients must not be used.
        StorageError: on every rank, if a parameter of any rank has left the memory that updates are written to.
    """
    # squares by slot, ranks that refuse their gradients, ranks with moved parameters, non-finite elements, zeros
    mine = torch.zeros(num_slots + 4, dtype=torch.float64, device=device)
    mine[-4] = refused is not None
    left = next((id for family in families for source in family.sources if (id := source.moved()) is not None), None)
    mine[-3] = left is not None
    for source, of_slots in _by_source(ready).items():
        for slot, grads in of_slots.items():
            _add_sweep_(mine, grads, slot=slot, scale=source.grad_scale, count_zeros=count_zeros)
    if copies := _uncounted_copies(ready):
        mine[-2] += grad_stats(copies, count_zeros=False).nonfinite.to(mine.device)
    shared = [source for family in families if family.is_on_all_of(everyone) for source in family.sources]
    for family in families:
        if not family.is_on_all_of(everyone):
            _settle_with_(family.sources, [family.axes.dp, family.axes.inter], mine[:0])
            mine[-1] -= _of_unused(family.sources, _numels(family.sources, ready) if count_zeros else ())
    brought = _numels(shared, ready) if count_zeros else []
    summed = _settle_with_(shared, [everyone], torch.cat([mine, mine.new_tensor([*flags, *brought])]))
    *squares, num_refused, num_moved, nonfinite, zeros = summed[: mine.numel()]
    if num_refused:
        raise refused or UnusableGradientError(
            f"{int(num_refused)} other rank(s) refused their gradients; the message there names the parameter. Nothing "
            "was updated"
        )
    if num_moved:
        raise StorageError(_moved_in_words(left, int(num_moved)))
    check(summed[mine.numel() : mine.numel() + len(flags)])
    zeros -= _of_unused(shared, summed[mine.numel() + len(flags) :])
    norms = [math.sqrt(s) if s >= 0 else math.nan for s in squares]
    if nonfinite:
        norms = [n if not math.isfinite(n) else math.inf for n in norms]
    return Stats(tuple(norms), int(nonfinite), int(zeros))


def reduce_norm(ready: Iterable[Ready], *, everyone: Comm, norm_type: float, slot: int) -> float:
    """The `norm_type`-norm of one slot's mean gradient over the whole model, loss scale still in; NaN or infinite where
    an element is. Every rank calls it: one small exchange.

    Raises:
        ValueError: `norm_type` is not above 0.
    """
    mine = []
    for source, of_slots in _by_source(ready).items():
        found = grad_stats(of_slots.get(slot, []), count_zeros=False, norm_type=norm_type)
        scale = source.grad_scale if math.isinf(norm_type) else source.grad_scale**norm_type
        mine.append(float(found.sum_of_squares) * scale)
    if math.isinf(norm_type):
        return _largest(everyone.gather_objects(_largest(mine)))
    powers: list[float] = everyone.gather_objects(sum(mine))
    return math.fsum(powers) ** (1.0 / norm_type) if all(map(math.isfinite, powers)) else sum(powers)


def reduce_zeros(ready: Iterable[Ready], *, everyone: Comm) -> int:
    """Zero elements of the ready gradients, of every norm slot, over the whole model. Every rank calls it."""
    mine = sum(
        int(grad_stats(grads, count_zeros=True).zeros)
        for of_slots in _by_source(ready).values()
        for grads in of_slots.values()
    )
    return sum(everyone.gather_objects(mine))


Counted = Mapping[Source, Mapping[int, list[Tensor]]]
"""The gradients that this rank counts, by source and norm slot."""


def _by_source(ready: Iterable[Ready]) -> Counted:
    found: dict[Source, dict[int, list[Tensor]]] = {}
    for pieces, grads in ready:
        for piece, grad in zip(pieces, grads, strict=True):
            if piece.counted:
                found.setdefault(piece.source, {}).setdefault(piece.norm_slot, []).append(grad)
    return found


def _moved_in_words(left: ParamId | None, num_ranks: int) -> str:
    which = f"parameter {str(left)!r}" if left is not None else f"a parameter on {num_ranks} other rank(s)"
    return (
        f"{which} has left the memory that the optimizer updates: the model was converted or moved, or param.data was "
        "assigned, after the optimizer was built; convert and move the model first, then build the optimizer. Nothing "
        "was updated"
    )


def _uncounted_copies(ready: Iterable[Ready]) -> list[Tensor]:
    """Gradients of which another rank counts its own copy; the copy here may still differ and must be finite."""
    return [
        grad
        for pieces, grads in ready
        for piece, grad in zip(pieces, grads, strict=True)
        if piece.inspected and not piece.counted
    ]


def _settle_with_(sources: Sequence[Source], comms: Sequence[Comm], beside: Tensor) -> list[float]:
    """Sums the sources' flags over `comms` and settles them. Returns the sum of `beside` (n,), which travels along."""
    flags = [source.flags().to(beside.device) for source in sources]
    joined = torch.cat([beside, *flags])
    if joined.numel():
        for comm in comms:
            _sum_(joined, comm)
    summed: list[float] = joined.tolist()  # the step's one host read for each family
    start = beside.numel()
    for source, own in zip(sources, flags, strict=True):
        source.settle_(summed[start : start + own.numel()])
        start += own.numel()
    return summed[: beside.numel()]


def _numels(sources: Sequence[Source], ready: Sequence[Ready]) -> list[float]:
    """Elements that this rank counts of each parameter that may turn out to have no gradient."""
    counted = {p.id: g.numel() for pieces, grads in ready for p, g in zip(pieces, grads, strict=True) if p.counted}
    return [counted.get(id, 0) for source in sources for id in source.doubtful]


def _of_unused(sources: Sequence[Source], numels: Sequence[float]) -> float:
    """The sum of those `numels`, one for each doubtful parameter (or none at all), that turned out to have none."""
    doubtful = ((id, source) for source in sources for id in source.doubtful)
    return sum(numel for numel, (id, source) in zip(numels, doubtful, strict=False) if id in source.unused())


def _sum_(x: Tensor, comm: Comm) -> None:
    try:
        comm.all_reduce_(x)
    except Exception as error:  # whatever a backend raises when a peer is gone
        raise CollectiveError(f"sum of the statistics: {error}") from error


def _add_sweep_(mine: Tensor, grads: list[Tensor], *, slot: int, scale: float, count_zeros: bool) -> None:
    found = grad_stats(grads, count_zeros=count_zeros)
    mine[slot] += found.sum_of_squares.to(mine.device) * scale**2
    mine[-2] += found.nonfinite.to(mine.device)
    mine[-1] += found.zeros.to(mine.device)


def _largest(values: Sequence[float]) -> float:
    """NaN where one is; 0 of none. The builtin would drop a NaN or not, depending on its place."""
    return math.nan if any(map(math.isnan, values)) else max(values, default=0.0)
