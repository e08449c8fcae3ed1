"""`Verdict`: norms, overflow and errors of a step, decided on the device from statistics that ranks sum once.

    gradients ─ one pass ─▶ squares, non-finite elements, zeros ┐
    noted losses ─▶ sum, number                                 │
    guards ─▶ flags                                             ├─ one all-reduce ─▶ `decide` ─▶ skip flag, scales
    gradients on some ranks only ─▶ flags                       ┘

Norms and zeros count one copy of each element. The update takes its skip flag and scales from the verdict. The host
reads one copy of it, `report`, when somebody asks: at once on a CPU.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, islice
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from opt_distributed.buffers.wires import naming
from opt_distributed.comm.collectives import Comm
from opt_distributed.comm.device import Device
from opt_distributed.comm.roles import Axes
from opt_distributed.pieces.piece import Kind, Ready, kinds_of
from opt_distributed.pieces.sources import BufferedGrads, Source
from opt_distributed.step.guard import Guard
from opt_distributed.step.spikes import Spikes
from opt_kernels.backends import grad_stats

Scale = TypeVar("Scale", bound=float | Tensor)

# Why a step is skipped, in the order in which a report names them.
OVERFLOW = "overflow"  # an element or a norm is infinite or NaN
ABOVE_LIMIT = "norm above the limit"  # the model's own norm
SPIKE = "spike of the norm"  # it is above `bounds[0]`
BAD_LOSS = "spike of the loss"  # also without `skip_sigma`: it is above `bounds[1]`, infinite or NaN
REASONS = (OVERFLOW, ABOVE_LIMIT, SPIKE, BAD_LOSS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits on the gradient norms of a step."""

    slots: tuple[str, ...] = ("",)  # names of the gradient norms; the first, "", is the model's own
    clips: tuple[bool, ...] = (True,)  # for each slot, whether its gradients are clipped to `max_norm`
    max_norm: float = 1.0  # of each clipped slot; 0 turns clipping off
    skip_above: float = math.inf  # a larger norm of slot "" skips the step
    count_zeros: bool = False


class Losses:
    """The losses that this rank noted for a step, each a sum and a number (2,) in memory of the device.

    New ones wait until gradients are prepared, and are then judged with those of steps that were not taken.
    """

    def __init__(self, device: torch.device):
        with torch.inference_mode(False):  # calls outside of inference mode must be able to write them, too
            self._new = torch.zeros(2, dtype=torch.float64, device=device)
            self._judged = torch.zeros_like(self._new)  # until their step ends

    def note(self, loss: Tensor | float) -> None:
        """Note a loss: a number, or a tensor of no dimensions on any device."""
        self._new[0] += loss.to(self._new) if isinstance(loss, Tensor) else loss
        self._new[1] += 1

    def take_for_judgement_(self) -> Tensor:
        """Move the new losses to those of the step whose gradients are prepared, and return these (2,)."""
        self._judged += self._new
        self._new.zero_()
        return self._judged

    def clear_judged_(self, *, unless: Tensor) -> None:
        """Forget those that were judged, whose step has ended. If `unless` is set, a 0-d bool tensor, they stay."""
        self._judged.copy_(torch.where(unless, self._judged, 0.0))

    def forget(self, *, noted: bool = True) -> None:
        """Forget the losses of prepared gradients whose step is not taken, and those that were `noted` since."""
        self._judged.zero_()
        if noted:
            self._new.zero_()


class Report(NamedTuple):
    """The content of a verdict on the host, equal on every rank."""

    norms: list[float]  # L2 norm of the mean gradient for each norm slot, without loss scale
    num_zeros: int
    reason: str  # the first of `REASONS` for which the update was not made, without an error; empty if there is none
    wrong: list[bool]  # for each guard
    sums: list[list[float]]  # of the flags of each guard
    loss: float | None  # the mean of what all ranks noted; None if none was noted
    bounds: list[float]  # above which the norm and the loss are spikes

    @property
    def overflow(self) -> bool:
        """Whether an element or a norm is infinite or NaN."""
        return self.reason == OVERFLOW

    @property
    def success(self) -> bool:
        """Whether the update was made."""
        return not (self.reason or any(self.wrong))

    @classmethod
    def of(cls, numbers: list[float], guards: Sequence[Guard], *, num_slots: int) -> "Report":
        """Read the copy of `Verdict.report`."""
        rest = iter(numbers)
        norms = list(islice(rest, num_slots))
        reasons = compress(REASONS, list(islice(rest, len(REASONS))))
        wrong = list(map(bool, islice(rest, len(guards))))
        loss, *bounds = islice(rest, 3)
        _num_nonfinite, num_zeros, _sum_of_losses, num_losses = islice(rest, 4)
        sums = [list(islice(rest, guard.num_flags)) for guard in guards]
        return cls(
            norms=norms,
            num_zeros=int(num_zeros),
            reason=next(reasons, ""),
            wrong=wrong,
            sums=sums,
            loss=loss if num_losses else None,
            bounds=bounds,
        )


class Verdict(NamedTuple):
    """The verdict on a step: tensors on the device, 0-d unless a shape is given."""

    norms: Tensor  # (slots,) float64, as in `Report`
    overflow: Tensor
    is_wrong: Tensor  # a guard refuses the step; the loss scale must not change
    skip: Tensor  # the update must write nothing
    inv_scale: float | Tensor  # 1 / loss scale
    report: Tensor  # (n,) float64: what the host reads

    def scales(self, max_norm: float, clips: Sequence[bool]) -> list[Tensor]:
        """The factor of the gradients of each norm slot: 1 / loss scale, times the clip coefficient where `clips`."""
        clipped = times(clip_coefficients(self.norms, max_norm), self.inv_scale).unbind()
        if all(clips):
            return list(clipped)
        whole = times(torch.ones_like(clipped[0]), self.inv_scale)
        return [factor if is_clipped else whole for factor, is_clipped in zip(clipped, clips, strict=True)]


def decide(
    numbers: Tensor,
    guards: Sequence[Guard],
    *,
    inv_scale: float | Tensor,
    limits: Limits,
    spikes: Spikes | None = None,
) -> Verdict:
    """Decide on a step from its statistics, the result of `reduce_stats`, which end with the flags of `guards`."""
    num_slots = len(limits.slots)
    squares, num_nonfinite, _, sum_of_losses, num_losses, *flags = numbers.split_with_sizes(
        [num_slots, 1, 1, 1, 1, *(guard.num_flags for guard in guards)]
    )
    norms = squares.sqrt()  # NaN if a sum is negative or NaN
    # Norms may be finite: the element is in a copy that is not counted, or is finite in float64.
    norms = torch.where(num_nonfinite > 0, norms + torch.inf, norms)
    overflow = ~(norms < torch.inf).all(0, keepdim=True)  # a NaN is not below
    norms = times(norms, inv_scale)
    is_above_limit = norms[:1] > limits.skip_above
    loss = sum_of_losses / num_losses  # NaN if none was noted
    wrong = [guard.is_wrong(sums) for guard, sums in zip(guards, flags, strict=True)]
    is_wrong = torch.cat([torch.zeros_like(overflow), *wrong]).any()
    measured = torch.cat([norms[:1], loss])
    bounds = torch.full_like(measured, torch.inf) if spikes is None else spikes.judge_(measured)
    is_spike = measured > bounds
    is_spike[1:] |= (num_losses > 0) & ~loss.isfinite()
    reasons = torch.cat([overflow, is_above_limit, is_spike, *wrong])
    report = torch.cat([norms, reasons, loss, bounds, numbers[num_slots:]])
    return Verdict(norms, overflow[0], is_wrong, reasons.any(), inv_scale, report)


def clip_coefficients(norms: Tensor, max_norm: float) -> Tensor:
    """Return `min(max_norm / (norm + 1e-6), 1)` for each of `norms` (n,); 1 if `max_norm` is 0: no clipping.

    Megatron-Core and `torch.nn.utils.clip_grad_norm_` add the same 1e-6. For an infinite or NaN norm the result is
    meaningless: a step with such a norm updates nothing.
    """
    if max_norm <= 0:
        return torch.ones_like(norms)
    # Tensor / tensor: torch computes `max_norm / norms` as a product with the rounded reciprocal.
    return torch.full_like(norms, max_norm).div_(norms + 1e-6).clamp_(max=1.0)


def times(numbers: Scale, factor: float | Tensor) -> Scale:
    """`numbers * factor`; without an operation on the device if the host knows that it would change nothing."""
    return numbers if isinstance(factor, float) and factor == 1.0 else cast(Scale, numbers * factor)


# --- the statistics ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Sources whose parameters are on the same ranks: dense ones, or experts."""

    sources: Sequence[Source]
    axes: Axes

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
    losses: Tensor,
    device: torch.device,
    everyone: Comm,
    instances: Comm,
    refuse: Callable[[Exception, Tensor], Tensor] | None,
) -> Tensor:
    """Sum the statistics of all ranks in one float64 all-reduce.

    The all-reduce includes `has_grads` of the sources, so that each knows which parameters no rank has used. Where only
    some ranks hold the parameters, or if zeros are counted, these exchange `has_grads` before: zeros that stand for
    missing gradients are not counted.

    Norms and zeros count one copy of each element. Infinities and NaNs are counted in every copy that may differ, so
    that a NaN on a rank whose copy is not counted stops the step as well.

    `flags` (n + m,) are float64 on the device: those of the guards, then `host_flags`. Guards' flags are summed with
    the rest; first over `instances`, the ranks in this one's place in all optimizer instances, which must refuse the
    same steps. So are `losses` (2,), their sum on this rank and their number. The host reads nothing, except in
    `BufferedGrads.resolve_`.

    `refuse` is called if this rank cannot compute its statistics, with the error and the guards' flags, and returns the
    flags with which all ranks refuse the step. Without it, or with several instances, which have summed their flags by
    then, the error is raised.

    Returns (slots + 4 + n,) float64 on the device, equal on every rank: the sum of squares of the mean gradient for
    each norm slot, which includes the loss scale; the number of non-finite elements and of zeros; the sum of the losses
    and their number; the sums of the guards' flags.

    Raises:
        CollectiveError: a collective failed, or exceeded the timeout of its group.
    """
    numels = [len(source.ids) for family in families for source in family.unresolved]
    of_guards, *of_sources = torch.split(flags, [len(flags) - sum(numels), *numels])
    if instances.size > 1:
        of_instances = torch.cat([losses, of_guards])
        with naming("sum of the statistics"):
            instances.all_reduce_(of_instances)
        losses, of_guards = torch.split(of_instances, [len(losses), len(of_guards)])
    joined: list[tuple[BufferedGrads, Tensor]] = []  # whose flags are in the one all-reduce
    for family in families:
        with_flags = [(source, of_sources.pop(0)) for source in family.unresolved]
        axes = family.axes
        if axes.dp.size == everyone.size and axes.inter.size == 1 and not limits.count_zeros:  # on all ranks
            joined += with_flags
        elif with_flags:
            _resolve_(with_flags, flags[:0], [axes.dp, axes.inter])
    try:
        swept = _swept(used(families, ready) if limits.count_zeros else ready, device, limits)
    except Exception as error:  # of any kind, such as a dtype that the device's kernels lack: the other ranks wait
        if refuse is None or instances.size > 1:
            raise
        swept = _swept([], device, limits)
        of_guards = refuse(error, of_guards)
    return _resolve_(joined, torch.cat([swept, losses, of_guards]), [everyone])


def _resolve_(of_sources: Sequence[tuple[BufferedGrads, Tensor]], numbers: Tensor, comms: Sequence[Comm]) -> Tensor:
    """Sum `numbers` (n,) and the sources' flags over `comms`, one all-reduce each; pass the sources their sums."""
    joined = torch.cat([numbers, *(of_source for _, of_source in of_sources)])
    for comm in comms if joined.numel() else ():
        with naming("sum of the statistics"):
            comm.all_reduce_(joined)
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
    for unit_grads in ready:
        pairs = [pair for pair in zip(unit_grads.pieces, unit_grads.grads, strict=True) if pair[0].id not in unused]
        kept.append(Ready([piece for piece, _ in pairs], [grad for _, grad in pairs]))
    return kept


@dataclass(slots=True)
class HostNumbers:
    """Numbers of the host on the device, copied there when they change: the same memory at every step."""

    device: Device
    numbers: Sequence[float] = ()
    place: Tensor | None = None

    def write_(self, numbers: Sequence[float]) -> Tensor:
        """Return (len(numbers),) float64: the same tensor at every call, unless the length has changed."""
        if self.place is None or numbers != self.numbers:
            with torch.inference_mode(False):  # a step outside of inference mode must be able to write it, too
                uploaded = self.device.upload(torch.tensor(numbers, dtype=torch.float64, device="cpu"))
                if self.place is None or len(numbers) != len(self.numbers):
                    self.place = uploaded.clone()
                else:
                    self.place.copy_(uploaded)
        self.numbers = numbers
        return self.place


class Prepared(NamedTuple):
    """The gradients of a step, and the verdict on them, before its update."""

    verdict: Verdict
    ready: Sequence[Ready]  # one for each unit
    max_norm: float  # to which gradients are clipped

    def norm(self, norm_type: float, *, everyone: Comm) -> float:
        """Return the `norm_type`-norm of slot "" of the mean gradient over the whole model, without loss scale.

        It is NaN or infinite if an element is. Collective, with one small exchange.

        Raises:
            ValueError: `norm_type` is not above 0.
        """
        local = []
        is_largest = math.isinf(norm_type)
        for source, grads_by_slot in _by_source(self.ready).items():
            found = grad_stats(grads_by_slot.get(0, []), count_zeros=False, norm_type=norm_type)
            scale = source.grad_scale if is_largest else source.grad_scale**norm_type
            local.append(float(found.sum_of_squares) * scale)
        here = _largest(local) if is_largest else sum(local)
        of_ranks: list[float] = everyone.gather_objects(here)
        if is_largest or not all(map(math.isfinite, of_ranks)):
            norm = _largest(of_ranks)
        else:
            norm = math.fsum(of_ranks) ** (1.0 / norm_type)
        return norm * float(self.verdict.inv_scale)

    def counted_grads(self, slot: int) -> list[Tensor]:
        """Return the gradients of this rank's parts that the norm of `slot` counts: fp32, mean, without loss scale."""
        scale = float(self.verdict.inv_scale)
        found = []
        for source, grads_by_slot in _by_source(self.ready).items():
            factor = source.grad_scale * scale
            found += [grad.to(torch.float32) * factor for grad in grads_by_slot.get(slot, ())]
        return found

    def num_zeros(self, *, everyone: Comm) -> int:
        """Count the zero elements of the gradients over the whole model, each once. Collective."""
        counted = (grads for grads_by_slot in _by_source(self.ready).values() for grads in grads_by_slot.values())
        return sum(everyone.gather_objects(sum(int(grad_stats(grads, count_zeros=True).zeros) for grads in counted)))


def _largest(values: Sequence[float]) -> float:
    """The largest value, NaN if any is NaN, 0 for none. Whether `max` returns a NaN depends on its position."""
    return math.nan if any(map(math.isnan, values)) else max(values, default=0.0)


def _by_source(ready: Iterable[Ready]) -> Mapping[Source, Mapping[int, list[Tensor]]]:
    """The gradients that this rank counts, by source and norm slot."""
    found: dict[Source, dict[int, list[Tensor]]] = {}
    for of_kind, grads in _by_kind(ready):
        if of_kind.counted:
            found.setdefault(of_kind.source, {}).setdefault(of_kind.norm_slot, []).extend(grads)
    return found


def _by_kind(ready: Iterable[Ready]) -> Iterator[tuple[Kind, Sequence[Tensor]]]:
    for unit_grads in ready:
        grads = unit_grads.grads
        kinds = kinds_of(unit_grads.pieces) if unit_grads.kinds is None else unit_grads.kinds
        for kind, places in kinds.items():
            yield kind, grads if len(places) == len(grads) else [grads[place] for place in places]


def _swept(ready: Sequence[Ready], device: torch.device, limits: Limits) -> Tensor:
    """(slots + 2,) float64: squares by slot, non-finite elements and zeros, of the gradients of this rank."""
    entries: list[list[Tensor]] = [[] for _ in range(len(limits.slots) + 2)]  # whose sums are the numbers
    for source, grads_by_slot in _by_source(ready).items():
        for slot, grads in grads_by_slot.items():
            found = grad_stats(grads, count_zeros=limits.count_zeros)
            entries[slot].append(times(found.sum_of_squares.to(device), source.grad_scale**2))
            entries[-2].append(found.nonfinite.to(device))
            entries[-1].append(found.zeros.to(device))
    # Another rank counts these; the local copies may differ.
    copies = [grad for kind, grads in _by_kind(ready) if kind.inspected and not kind.counted for grad in grads]
    if copies:
        entries[-2].append(grad_stats(copies, count_zeros=False).nonfinite.to(device))
    nothing = torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([sum(of_entry[1:], of_entry[0]).double() if of_entry else nothing for of_entry in entries])
