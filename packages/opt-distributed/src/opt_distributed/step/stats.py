"""The statistics of a step: norms, overflow and zeros, with every element counted once, in one reduction."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from opt_distributed.buffers.wires import CollectiveError
from opt_distributed.comm.collectives import ALONE, Comm
from opt_distributed.comm.device import Device
from opt_distributed.comm.groups import Axes
from opt_distributed.pieces.piece import Kind, Ready, kinds_of
from opt_distributed.pieces.sources import Source
from opt_distributed.step.verdict import times
from opt_kernels.backends import grad_stats

Upload = Callable[[Callable[[], Tensor]], Tensor]
"""Uploads the host tensor that a function returns to the device of the step, without blocking the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Sources whose parameters are on the same ranks: dense ones, or experts."""

    sources: Sequence[Source]
    axes: Axes

    def is_on_all_of(self, comm: Comm) -> bool:
        """Whether the ranks of `comm` are exactly those that hold these parameters."""
        return self.axes.dp.size == comm.size and self.axes.inter.size == 1


def reduce_stats(
    families: Sequence[Family],
    ready: Sequence[Ready],
    *,
    everyone: Comm,
    device: torch.device,
    num_slots: int,
    count_zeros: bool,
    flags: Tensor,
    upload: Upload,
    instances: Comm = ALONE,
) -> Tensor:
    """Sum the statistics of all ranks in one float64 all-reduce. No two ranks count the same element.

    The all-reduce includes the sources' flags, if all ranks hold the parameters. If only some do, these exchange flags
    first. Zeros that stand for missing gradients are not counted: each source reports their number with its flags.

    Norms and zeros count one copy of each element. Infinities and NaNs are counted in every copy that may differ, so
    that a NaN on a rank whose copy is not counted stops the step as well.

    `flags` (n,) are those of the guards, float64 on the device, and are summed with the rest; first over `instances`,
    the ranks in this one's place in all optimizer instances, which must refuse the same steps. `upload` copies other
    numbers of the host to the device, which are the same at every step in which the same parameters have gradients. The
    host reads nothing, except in `Source.resolve_`.

    Returns (num_slots + 2 + n,) float64 on the device, equal on every rank: the sum of squares of the mean gradient for
    each norm slot, which includes the loss scale; the number of non-finite elements and of zeros; the sums of `flags`.

    Raises:
        CollectiveError: a collective failed, or exceeded the timeout of its group.
    """
    if instances.size > 1:
        flags = flags.clone()
        _sum_(flags, instances)
    local = torch.cat([_swept(ready, device=device, num_slots=num_slots, count_zeros=count_zeros), flags])
    if not [source for family in families for source in family.sources if source.unresolved]:
        _sum_(local, everyone)
        return local
    shared = [source for family in families if family.is_on_all_of(everyone) for source in family.sources]
    for family in families:
        if not family.is_on_all_of(everyone):
            counts = _resolve_with_(family.sources, [family.axes.dp, family.axes.inter], local[:0], upload).counts
            numels = _numels(family.sources, ready) if count_zeros else []
            if numels:
                _subtract_unused_(local[num_slots + 1], upload(partial(host_numbers, numels)), counts)
    numels = _numels(shared, ready) if count_zeros else []
    if numels:
        local = torch.cat([local, upload(lambda: host_numbers(numels))])
    summed, counts = _resolve_with_(shared, [everyone], local, upload)
    if not numels:
        return summed
    sums, numels_of_all = torch.split(summed, [summed.numel() - len(numels), len(numels)])
    _subtract_unused_(sums[num_slots + 1], numels_of_all, counts)
    return sums


class HostNumbers:
    """Numbers of the host on the device, copied there when they change: the same memory at every step."""

    def __init__(self, device: Device):
        self._device = device
        self._numbers: Sequence[float] = ()
        self._place: Tensor | None = None

    def write_(self, numbers: Sequence[float]) -> Tensor:
        """Return (len(numbers),) float64: the same tensor at every call, unless the length has changed."""
        if self._place is None or len(numbers) != len(self._numbers):
            self._place = self._device.upload(host_numbers(numbers)).clone()
        elif numbers != self._numbers:
            self._place.copy_(self._device.upload(host_numbers(numbers)))
        self._numbers = numbers
        return self._place


def reduce_norm(ready: Iterable[Ready], *, everyone: Comm, norm_type: float, slot: int) -> float:
    """Return the `norm_type`-norm of one slot's mean gradient over the whole model, loss scale included.

    It is NaN or infinite if an element is. Collective, with one small exchange.

    Raises:
        ValueError: `norm_type` is not above 0.
    """
    local = []
    for source, of_slots in _by_source(ready).items():
        found = grad_stats(of_slots.get(slot, []), count_zeros=False, norm_type=norm_type)
        scale = source.grad_scale if math.isinf(norm_type) else source.grad_scale**norm_type
        local.append(float(found.sum_of_squares) * scale)
    if math.isinf(norm_type):
        return _largest(everyone.gather_objects(_largest(local)))
    powers: list[float] = everyone.gather_objects(sum(local))
    return math.fsum(powers) ** (1.0 / norm_type) if all(map(math.isfinite, powers)) else sum(powers)


def counted_grads(ready: Iterable[Ready], *, slot: int, scale: float) -> list[Tensor]:
    """Return the mean gradients, fp32 and times `scale`, of which this rank counts the elements in a norm's slot."""
    return [
        grad.to(torch.float32) * (source.grad_scale * scale)
        for source, of_slots in _by_source(ready).items()
        for grad in of_slots.get(slot, ())
    ]


def reduce_zeros(ready: Iterable[Ready], *, everyone: Comm) -> int:
    """Count the zero elements of the ready gradients over the whole model. Collective."""
    local = sum(
        int(grad_stats(grads, count_zeros=True).zeros)
        for of_slots in _by_source(ready).values()
        for grads in of_slots.values()
    )
    return sum(everyone.gather_objects(local))


Counted = Mapping[Source, Mapping[int, list[Tensor]]]
"""The gradients that this rank counts, by source and norm slot."""


def _by_source(ready: Iterable[Ready]) -> Counted:
    found: dict[Source, dict[int, list[Tensor]]] = {}
    for of_kind, grads in _by_kind(ready):
        if of_kind.counted:
            found.setdefault(of_kind.source, {}).setdefault(of_kind.norm_slot, []).extend(grads)
    return found


def _uncounted_copies(ready: Iterable[Ready]) -> list[Tensor]:
    """Gradients of which another rank counts a copy. The local copy may differ, so it is checked for NaNs, too."""
    return [grad for of_kind, grads in _by_kind(ready) if of_kind.inspected and not of_kind.counted for grad in grads]


def _by_kind(ready: Iterable[Ready]) -> Iterator[tuple[Kind, Sequence[Tensor]]]:
    for of_unit in ready:
        grads, kinds = of_unit.grads, kinds_of(of_unit.pieces) if of_unit.kinds is None else of_unit.kinds
        for kind, places in kinds.items():
            yield kind, grads if len(places) == len(grads) else [grads[place] for place in places]


class _Resolved(NamedTuple):
    """Sums over ranks."""

    summed: Tensor  # (n,) of the given numbers
    counts: Tensor | None  # (unresolved parameters,): ranks that have a gradient of each; None without such parameters


def _resolve_with_(sources: Sequence[Source], comms: Sequence[Comm], numbers: Tensor, upload: Upload) -> _Resolved:
    """Sum `numbers` (n,) and the sources' flags over `comms` in one all-reduce each; pass the sources their sums."""
    sizes = [len(source.unresolved) for source in sources]
    joined = numbers
    if any(sizes):
        joined = torch.cat([numbers, upload(lambda: torch.cat([source.flags() for source in sources]))])
    if joined.numel():
        for comm in comms:
            _sum_(joined, comm)
    if not any(sizes):
        return _Resolved(joined, None)
    summed, *of_sources = torch.split(joined, [numbers.numel(), *sizes])
    for source, own in zip(sources, of_sources, strict=True):
        if own.numel():
            source.resolve_(own)
    return _Resolved(summed, joined[numbers.numel() :])


def _numels(sources: Sequence[Source], ready: Sequence[Ready]) -> list[float]:
    """The number of elements that this rank counts of each unresolved parameter."""
    counted = {p.id: g.numel() for one in ready for p, g in zip(one.pieces, one.grads, strict=True) if p.counted}
    return [counted.get(id, 0) for source in sources for id in source.unresolved]


def _subtract_unused_(zeros: Tensor, numels: Tensor, counts: Tensor | None) -> None:
    """Subtract from `zeros` the elements of parameters that have no gradient on any rank."""
    assert counts is not None
    zeros.sub_((numels * (counts == 0)).sum())


def host_numbers(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _sum_(x: Tensor, comm: Comm) -> None:
    try:
        comm.all_reduce_(x)
    except Exception as error:  # whatever a backend raises when a peer is gone
        raise CollectiveError(f"sum of the statistics: {error}") from error


def _swept(ready: Sequence[Ready], *, device: torch.device, num_slots: int, count_zeros: bool) -> Tensor:
    """(num_slots + 2,) float64: squares by slot, non-finite elements and zeros, of the gradients of this rank."""
    entries: list[list[Tensor]] = [[] for _ in range(num_slots + 2)]  # whose sums are the numbers
    for source, of_slots in _by_source(ready).items():
        for slot, grads in of_slots.items():
            found = grad_stats(grads, count_zeros=count_zeros)
            entries[slot].append(times(found.sum_of_squares.to(device), source.grad_scale**2))
            entries[-2].append(found.nonfinite.to(device))
            entries[-1].append(found.zeros.to(device))
    if copies := _uncounted_copies(ready):
        entries[-2].append(grad_stats(copies, count_zeros=False).nonfinite.to(device))
    sums = [sum(of_entry[1:], of_entry[0]).double() if of_entry else None for of_entry in entries]
    return torch.stack([torch.zeros((), dtype=torch.float64, device=device) if s is None else s for s in sums])


def _largest(values: Sequence[float]) -> float:
    """The largest value, NaN if any is NaN, 0 for none. Whether `max` returns a NaN depends on its position."""
    return math.nan if any(map(math.isnan, values)) else max(values, default=0.0)
