"""The statistics of a step: norms, overflow, zeros; each element counted once over all ranks, in one reduction."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opt_distributed.buffers.wire import CollectiveError
from opt_distributed.comm.collectives import Comm
from opt_distributed.comm.groups import Axes
from opt_distributed.step.sources import Source
from opt_distributed.step.unit import Ready
from opt_kernels.backends.grad_stats import grad_stats
from opt_paramgroups import ParamId

Upload = Callable[[Callable[[], Tensor]], Tensor]
"""Brings the tensor of the host that a function makes to the device of the step; the host does not wait."""


class Sums(NamedTuple):
    """What all ranks found together in this step's gradients; equal on every rank. Numbers on the host, or tensors."""

    squares: Any  # (slots,) of the mean gradient, for each norm slot; loss scale still in
    num_nonfinite: Any
    num_zeros: Any
    num_refused: Any  # ranks that refuse their gradients
    num_moved: Any  # ranks with parameters that updates no longer reach
    flags: Any  # (n,) of what was given to travel along

    @classmethod
    def of(cls, numbers: Sequence[float] | Tensor, *, num_slots: int) -> "Sums":
        """From what `reduce_stats` gives, on the device or on the host."""
        nonfinite, zeros, refused, moved = (numbers[num_slots + index] for index in range(4))
        return cls(numbers[:num_slots], nonfinite, zeros, refused, moved, numbers[num_slots + 4 :])


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
    known: Tensor,
    upload: Upload,
) -> Tensor:
    """One all-reduce over all ranks, in float64: each brings what it counts, and no two count the same element.

    It carries the sources' flags too, where all ranks share the parameters; where only some do, these exchange them
    first. Zeros filled in for missing gradients are excluded: each source reports their count next to its flags.

    Norms and zeros count one copy of each element. Finiteness is judged on every copy that may differ: a NaN on a rank
    whose copy is not counted stops the step as well.

    `known` travels along: what `known_numbers` gives, on the device. `upload` brings other numbers of the host there,
    which are the same at every step in which the same parameters have gradients. The host reads nothing, except where
    a source has to (`Source.settle_`). Returns `Sums` as one tensor, float64 on the device.

    Raises:
        CollectiveError: a collective failed, or ran into the group's timeout.
    """
    swept = torch.zeros(num_slots + 2, dtype=torch.float64, device=device)  # squares by slot, non-finite, zeros
    for source, of_slots in _by_source(ready).items():
        for slot, grads in of_slots.items():
            _add_sweep_(swept, grads, slot=slot, scale=source.grad_scale, count_zeros=count_zeros)
    if copies := _uncounted_copies(ready):
        swept[-2] += grad_stats(copies, count_zeros=False).nonfinite.to(device)
    shared = [source for family in families if family.is_on_all_of(everyone) for source in family.sources]
    for family in families:
        if not family.is_on_all_of(everyone):
            counts = _settle_with_(family.sources, [family.axes.dp, family.axes.inter], swept[:0], upload).of_doubtful
            numels = _numels(family.sources, ready) if count_zeros else []
            if numels:
                _subtract_unused_(swept[-1], upload(partial(host_numbers, numels)), counts)
    numels = _numels(shared, ready) if count_zeros else []
    beside = [swept, known, upload(lambda: host_numbers(numels))] if numels else [swept, known]
    summed, counts = _settle_with_(shared, [everyone], torch.cat(beside), upload)
    if not numels:
        return summed
    sums, numels_of_all = torch.split(summed, [summed.numel() - len(numels), len(numels)])
    _subtract_unused_(sums[num_slots + 1], numels_of_all, counts)
    return sums


def known_numbers(*, refused: bool, moved: bool, flags: Sequence[float] = ()) -> list[float]:
    """What the host adds to the statistics: whether this rank refuses its gradients, whether updates no longer reach
    one of its parameters, and `flags`, as many on every rank."""
    return [float(refused), float(moved), *flags]


def moved_parameter(families: Iterable[Family]) -> ParamId | None:
    """A parameter of this rank that has left the memory which updates are written to; None if none has."""
    return next((id for family in families for source in family.sources if (id := source.moved()) is not None), None)


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


def _uncounted_copies(ready: Iterable[Ready]) -> list[Tensor]:
    """Gradients of which another rank counts its own copy; the copy here may still differ and must be finite."""
    return [
        grad
        for pieces, grads in ready
        for piece, grad in zip(pieces, grads, strict=True)
        if piece.inspected and not piece.counted
    ]


class _Settled(NamedTuple):
    """Sums over ranks."""

    beside: Tensor  # (n,)
    of_doubtful: Tensor  # (doubtful parameters,): ranks that have a gradient of each


def _settle_with_(sources: Sequence[Source], comms: Sequence[Comm], beside: Tensor, upload: Upload) -> _Settled:
    """Sums the sources' flags over `comms` and settles them; `beside` (n,) travels along."""
    sizes = [len(source.doubtful) for source in sources]
    joined = beside
    if sum(sizes):
        joined = torch.cat([beside, upload(lambda: torch.cat([source.flags() for source in sources]))])
    if joined.numel():
        for comm in comms:
            _sum_(joined, comm)
    if not sum(sizes):
        return _Settled(joined, joined[:0])
    summed, *settled = torch.split(joined, [beside.numel(), *sizes])
    for source, own in zip(sources, settled, strict=True):
        if own.numel():
            source.settle_(own)
    return _Settled(summed, joined[beside.numel() :])


def _numels(sources: Sequence[Source], ready: Sequence[Ready]) -> list[float]:
    """Elements that this rank counts of each parameter that may turn out to have no gradient."""
    counted = {p.id: g.numel() for pieces, grads in ready for p, g in zip(pieces, grads, strict=True) if p.counted}
    return [counted.get(id, 0) for source in sources for id in source.doubtful]


def _subtract_unused_(zeros: Tensor, numels: Tensor, counts: Tensor) -> None:
    """Takes the elements of parameters that no rank has a gradient of from `zeros`."""
    zeros.sub_((numels * (counts == 0)).sum())


def host_numbers(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _sum_(x: Tensor, comm: Comm) -> None:
    try:
        comm.all_reduce_(x)
    except Exception as error:  # whatever a backend raises when a peer is gone
        raise CollectiveError(f"sum of the statistics: {error}") from error


def _add_sweep_(swept: Tensor, grads: list[Tensor], *, slot: int, scale: float, count_zeros: bool) -> None:
    found = grad_stats(grads, count_zeros=count_zeros)
    swept[slot] += found.sum_of_squares.to(swept.device) * scale**2
    swept[-2] += found.nonfinite.to(swept.device)
    swept[-1] += found.zeros.to(swept.device)


def _largest(values: Sequence[float]) -> float:
    """NaN where one is; 0 of none. The builtin would drop a NaN or not, depending on its place."""
    return math.nan if any(map(math.isnan, values)) else max(values, default=0.0)
