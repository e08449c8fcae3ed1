"""`Verdict`: norms, overflow and errors of a step, decided by torch's operations on the device of its statistics.

The update takes its skip flag and scales from the verdict. The host reads one copy of it, `report`, when somebody asks:
at once on a CPU, and at the latest in the next step on an accelerator.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from opt_distributed.step.guards.guard import Guard

Scale = TypeVar("Scale", bound=float | Tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits on the gradient norms of a step."""

    slots: tuple[str, ...] = ("",)  # names of the gradient norms; the first, "", is the model's own
    clips: tuple[bool, ...] = (True,)  # for each slot, whether its gradients are clipped to `max_norm`
    max_norm: float = 1.0  # of each clipped slot; 0 turns clipping off
    skip_above: float = math.inf  # a larger norm of slot "" refuses the step
    count_zeros: bool = False


class Report(NamedTuple):
    """The content of a verdict on the host, equal on every rank."""

    norms: list[float]  # L2 norm of the mean gradient for each norm slot, without loss scale
    num_zeros: int
    overflow: bool  # an element or a norm is infinite or NaN
    is_refused: bool  # the model's own norm is above the limit
    wrong: list[bool]  # for each guard
    flags: list[float]  # sums of the guards' flags

    @property
    def success(self) -> bool:
        """Whether the update was made."""
        return not (self.overflow or self.is_refused or any(self.wrong))

    @classmethod
    def of(cls, numbers: list[float], *, num_slots: int, num_guards: int) -> "Report":
        """Read the copy of `Verdict.report`."""
        norms, (overflow, refused, *rest) = numbers[:num_slots], numbers[num_slots:]
        wrong, (_, zeros, *flags) = rest[:num_guards], rest[num_guards:]
        return cls(norms, int(zeros), bool(overflow), bool(refused), list(map(bool, wrong)), flags)


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


def decide(numbers: Tensor, guards: Sequence[Guard], *, inv_scale: float | Tensor, limits: Limits) -> Verdict:
    """Decide on a step from its statistics, the result of `reduce_stats`, which end with the flags of `guards`."""
    num_slots = len(limits.slots)
    squares, num_nonfinite, _, *flags = numbers.split_with_sizes(
        [num_slots, 1, 1, *(guard.num_flags for guard in guards)]
    )
    norms = squares.sqrt()  # NaN if a sum is negative or NaN
    # Norms may be finite: the element is in a copy that is not counted, or is finite in float64.
    norms = torch.where(num_nonfinite > 0, norms + torch.inf, norms)
    overflow = ~(norms < torch.inf).all(0, keepdim=True)  # a NaN is not below
    norms = times(norms, inv_scale)
    is_refused = norms[:1] > limits.skip_above
    wrong = [guard.is_wrong(sums) for guard, sums in zip(guards, flags, strict=True)]
    reasons = torch.cat([overflow, is_refused, *wrong])
    report = torch.cat([norms, reasons, numbers[num_slots:]])
    return Verdict(norms, overflow[0], reasons[2:].any(), reasons.any(), inv_scale, report)


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
