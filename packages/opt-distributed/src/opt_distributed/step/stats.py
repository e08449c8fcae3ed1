"""The statistics of a step: norms, overflow and zeros, with every element counted once, in one reduction."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from opt_distributed.buffers.wires import CollectiveError
from opt_distributed.comm.collectives import Comm
from opt_distributed.comm.device import Device
from opt_distributed.comm.roles import Axes
from opt_distributed.pieces.piece import Kind, Ready, kinds_of
from opt_distributed.pieces.sources import BufferedGrads, Source
from opt_distributed.step.verdict import Limits, times
from opt_kernels.backends import grad_stats as grad_stats  # also for `tensor_stats`: doubles replace it here


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Sources whose parameters are on the same ranks: dense ones, or experts."""

    sources: Sequence[Source]
    axes: Axes

    def is_on_all_of(self, comm: Comm) -> bool:
        """Whether the ranks of `comm` are exactly those that hold these parameters."""
        return self.axes.dp.size == comm.size and self.axes.inter.size == 1

    @property
    def unresolved(self) -> list[BufferedGrads]:
        """Sources whose parameters may have a gradient on some ranks only."""
        return [source for source in self.sources if isinstance(source, BufferedGrads)]


def host_flags(families: Iterable[Family]) -> list[float]:
    """Whether each parameter of the unresolved sources has a gradient on this rank."""
    return [float(has) for family in families for source in family.unresolved for has in source.has_grads()]


def reduce_stats(
    families: Sequence[Family],
    ready: Sequence[Ready],
    flags: Tensor,
    limits: Limits,
    *,
    device: torch.device,
    everyone: Comm,
    instances: Comm,
) -> Tensor:
    """Sum the statistics of all ranks in one float64 all-reduce.

    The all-reduce includes `has_grads` of the sources, so that each knows which parameters no rank has used. Where only
    some ranks hold the parameters, or if zeros are counted, these exchange `has_grads` before: zeros that stand for
    missing gradients are not counted.

    Norms and zeros count one copy of each element. Infinities and NaNs are counted in every copy that may differ, so
    that a NaN on a rank whose copy is not counted stops the step as well.

    `flags` (n + m,) are float64 on the device: those of the guards, then `host_flags`. Guards' flags are summed with
    the rest; first over `instances`, the ranks in this one's place in all optimizer instances, which must refuse the
    same steps. The host reads nothing, except in `BufferedGrads.resolve_`.

    Returns (slots + 2 + n,) float64 on the device, equal on every rank: the sum of squares of the mean gradient for
    each norm slot, which includes the loss scale; the number of non-finite elements and of zeros; the sums of the
    guards' flags.

    Raises:
        CollectiveError: a collective failed, or exceeded the timeout of its group.
    """
    numels = [len(source.ids) for family in families for source in family.unresolved]
    of_guards, *of_sources = torch.split(flags, [len(flags) - sum(numels), *numels])
    if instances.size > 1:
        of_guards = of_guards.clone()
        _sum_(of_guards, instances)
    joined: list[tuple[BufferedGrads, Tensor]] = []  # whose flags are in the one all-reduce
    for family in families:
        with_flags = [(source, of_sources.pop(0)) for source in family.unresolved]
        if family.is_on_all_of(everyone) and not limits.count_zeros:
            joined += with_flags
        elif with_flags:
            _resolve_(with_flags, flags[:0], [family.axes.dp, family.axes.inter])
    swept = _swept(used(families, ready) if limits.count_zeros else ready, device, limits)
    return _resolve_(joined, torch.cat([swept, of_guards]), [everyone])


def _resolve_(of_sources: Sequence[tuple[BufferedGrads, Tensor]], numbers: Tensor, comms: Sequence[Comm]) -> Tensor:
    """Sum `numbers` (n,) and the sources' flags over `comms`, one all-reduce each; pass the sources their sums."""
    joined = torch.cat([numbers, *(of_source for _, of_source in of_sources)])
    for comm in comms if joined.numel() else ():
        _sum_(joined, comm)
    summed, *counts = torch.split(joined, [len(numbers), *(len(of_source) for _, of_source in of_sources)])
    for (source, _), count in zip(of_sources, counts, strict=True):
        source.resolve_(count)
    return summed


def used(families: Sequence[Family], ready: Sequence[Ready]) -> Sequence[Ready]:
    """Drop the pieces of parameters that no rank has used, once that is resolved."""
    unused = {id for family in families for source in family.unresolved for id in source.unused}
    if not unused:
        return ready
    kept = []
    for of_unit in ready:
        pairs = [pair for pair in zip(of_unit.pieces, of_unit.grads, strict=True) if pair[0].id not in unused]
        kept.append(Ready([piece for piece, _ in pairs], [grad for _, grad in pairs]))
    return kept


class HostNumbers:
    """Numbers of the host on the device, copied there when they change: the same memory at every step."""

    def __init__(self, device: Device):
        self._device = device
        self._numbers: Sequence[float] = ()
        self._place: Tensor | None = None

    def write_(self, numbers: Sequence[float]) -> Tensor:
        """Return (len(numbers),) float64: the same tensor at every call, unless the length has changed."""
        if self._place is None or len(numbers) != len(self._numbers):
            self._place = self._device.upload(torch.tensor(numbers, dtype=torch.float64)).clone()
        elif numbers != self._numbers:
            self._place.copy_(self._device.upload(torch.tensor(numbers, dtype=torch.float64)))
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
    counted = (grads for of_slots in _by_source(ready).values() for grads in of_slots.values())
    return sum(everyone.gather_objects(sum(int(grad_stats(grads, count_zeros=True).zeros) for grads in counted)))


def _by_source(ready: Iterable[Ready]) -> Mapping[Source, Mapping[int, list[Tensor]]]:
    """The gradients that this rank counts, by source and norm slot."""
    found: dict[Source, dict[int, list[Tensor]]] = {}
    for of_kind, grads in _by_kind(ready):
        if of_kind.counted:
            found.setdefault(of_kind.source, {}).setdefault(of_kind.norm_slot, []).extend(grads)
    return found


def _by_kind(ready: Iterable[Ready]) -> Iterator[tuple[Kind, Sequence[Tensor]]]:
    for of_unit in ready:
        grads, kinds = of_unit.grads, kinds_of(of_unit.pieces) if of_unit.kinds is None else of_unit.kinds
        for kind, places in kinds.items():
            yield kind, grads if len(places) == len(grads) else [grads[place] for place in places]


def _sum_(x: Tensor, comm: Comm) -> None:
    try:
        comm.all_reduce_(x)
    except Exception as error:  # whatever a backend raises when a peer is gone
        raise CollectiveError(f"sum of the statistics: {error}") from error


def _swept(ready: Sequence[Ready], device: torch.device, limits: Limits) -> Tensor:
    """(slots + 2,) float64: squares by slot, non-finite elements and zeros, of the gradients of this rank."""
    entries: list[list[Tensor]] = [[] for _ in range(len(limits.slots) + 2)]  # whose sums are the numbers
    for source, of_slots in _by_source(ready).items():
        for slot, grads in of_slots.items():
            found = grad_stats(grads, count_zeros=limits.count_zeros)
            entries[slot].append(times(found.sum_of_squares.to(device), source.grad_scale**2))
            entries[-2].append(found.nonfinite.to(device))
            entries[-1].append(found.zeros.to(device))
    # Another rank counts these; the local copies may differ.
    copies = [grad for kind, grads in _by_kind(ready) if kind.inspected and not kind.counted for grad in grads]
    if copies:
        entries[-2].append(grad_stats(copies, count_zeros=False).nonfinite.to(device))
    sums = [sum(of_entry[1:], of_entry[0]).double() if of_entry else None for of_entry in entries]
    return torch.stack([torch.zeros((), dtype=torch.float64, device=device) if s is None else s for s in sums])


def _largest(values: Sequence[float]) -> float:
    """The largest value, NaN if any is NaN, 0 for none. Whether `max` returns a NaN depends on its position."""
    return math.nan if any(map(math.isnan, values)) else max(values, default=0.0)
