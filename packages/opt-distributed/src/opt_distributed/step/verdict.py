"""The verdict on a step, from its statistics: norms, overflow, refusal, errors. On the host, or on the device.

`Verdict` is the host's view, which is read on demand. If the host must not wait, `Decided` holds the same decisions as
tensors, from which the update takes its skip flag and scales. Both follow the same rules.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from opt_distributed.buffers.binding import UnusableGradientError
from opt_distributed.buffers.stored import StorageError
from opt_distributed.comm.device import Device, HostCopy
from opt_distributed.step.clip import clip_coefficient, clip_coefficients, times
from opt_distributed.step.group_check import GroupCheck, Groups
from opt_distributed.step.limits import Limits
from opt_distributed.step.stats import Sums
from opt_paramgroups import ParamId


class Findings(NamedTuple):
    """The content of a verdict on the host, equal on every rank."""

    overflow: bool  # an element or a norm is infinite or NaN, so that nothing may be updated
    is_refused: bool  # the model's own norm is above the limit
    num_zeros: int
    norms: tuple[float, ...]  # L2 norm of the mean gradient for each norm slot, without loss scale


class Objections(NamedTuple):
    """Reasons on this rank not to update, and the check of its parameter groups."""

    refused: UnusableGradientError | ValueError | None  # why its gradients or its groups must not be used
    moved: ParamId | None  # a parameter that has left the memory which updates write to
    group_check: GroupCheck | None
    groups: Groups


class Terms(NamedTuple):
    """What a verdict depends on in addition to sums over ranks."""

    num_slots: int  # of norms
    inv_scale: float | Tensor  # 1 / loss scale
    skip_above: float  # the step is refused if the norm of the first slot is larger


class Verdict:
    """The verdict on one step, as the host reads it."""

    skip: Tensor | None = None  # 0-d bool on the device: the update must write nothing; None if the host decides

    def __init__(self, numbers: Tensor, objections: Objections, terms: Terms, device: Device):
        self._objections, self._terms = objections, terms
        self._copy = HostCopy(numbers, device)
        self._copy_of_scale = HostCopy(terms.inv_scale, device) if isinstance(terms.inv_scale, Tensor) else None
        self._findings: Findings | None = None

    @property
    def is_own(self) -> bool:
        """Whether this rank itself has an error to raise."""
        return self._objections.refused is not None or self._objections.moved is not None

    @property
    def overflow(self) -> bool | Tensor:
        """Whether gradients overflowed."""
        return self.findings.overflow

    @property
    def has_error(self) -> Tensor | None:
        """0-d bool on the device: whether `findings` will raise; None if the host decides."""
        return None

    @property
    def findings(self) -> Findings:
        """The content of the verdict. The host waits for it. Raises the errors of `check`."""
        if self._findings is None:
            self._findings = _judged(self.check(), inv_scale=self.inv_scale, skip_above=self._terms.skip_above)
        return self._findings

    def check(self) -> Sums:
        """Return the statistics, for which the host waits.

        Raises:
            UnusableGradientError: the gradients or the groups of another rank, or the gradients of this one, must not
                be used.
            ValueError: the groups of this rank must not be used, see `Stepper.check_groups`.
            StorageError: a parameter of a rank has left the memory that updates write to.
            HyperError: ranks would update a group with different numbers.
        """
        refused, moved, group_check, groups = self._objections
        sums = Sums.of(self._copy.wait().tolist(), num_slots=self._terms.num_slots)
        if sums.num_refused:
            raise refused or UnusableGradientError(
                f"{int(sums.num_refused)} other rank(s) refused their gradients or parameter groups; the message there "
                "names them. Nothing was updated"
            )
        if sums.num_moved:
            raise StorageError(_moved_in_words(moved, int(sums.num_moved)))
        if group_check is not None:
            group_check.check(sums.flags, groups)
        return sums

    def arrives(self, within: float) -> bool:
        """Wait at most `within` seconds until `findings` can be read without waiting. Return whether it can."""
        copies = [copy for copy in (self._copy, self._copy_of_scale) if copy is not None]
        return all(copy.arrives(within) for copy in copies)

    @property
    def inv_scale(self) -> float:
        """1 / loss scale, as the step used it. The host waits for it."""
        if self._copy_of_scale is not None:
            return float(self._copy_of_scale.wait())
        return float(self._terms.inv_scale)

    def scales(self, max_norm: float, clips: Sequence[bool]) -> Sequence[float | Tensor]:
        """The factors of the gradients of each norm slot. Slots for which `clips` is true are clipped."""
        norms = zip(self.findings.norms, clips, strict=True)
        inv_scale = self.inv_scale
        return [inv_scale * (clip_coefficient(norm, max_norm) if clips else 1.0) for norm, clips in norms]


class Decided(NamedTuple):
    """A verdict that is decided on the device: tensors there, 0-d unless a shape is given."""

    numbers: Tensor  # (n,) float64: the statistics
    inv_scale: float | Tensor
    norms: Tensor  # (slots,) float64, as in `Findings`
    overflow: Tensor
    has_error: Tensor  # whether `Verdict.findings` will raise
    skip: Tensor  # the update must write nothing

    @classmethod
    def of(cls, numbers: Tensor, group_check: GroupCheck | None, terms: Terms) -> "Decided":
        """Decide by the rules of `Verdict.findings`."""
        sums = Sums.of(numbers, num_slots=terms.num_slots)
        norms = sums.squares.sqrt()  # NaN if a sum is negative or NaN
        norms = torch.where(sums.num_nonfinite > 0, norms + torch.inf, norms)
        overflow = ~(norms < torch.inf).all()  # a NaN is not below
        has_error = (sums.num_refused + sums.num_moved) > 0
        if group_check is not None and group_check.compares:
            has_error |= group_check.differ(sums.flags).any()
        norms = times(norms, terms.inv_scale)
        skip = overflow | has_error
        if terms.skip_above < math.inf:
            skip |= norms[0] > terms.skip_above
        return cls(numbers, terms.inv_scale, norms, overflow, has_error, skip)

    def scales(self, max_norm: float, clips: Sequence[bool]) -> Sequence[Tensor]:
        """See `Verdict.scales`."""
        coefficients = clip_coefficients(self.norms, max_norm).unbind()
        by_slot = zip(coefficients, clips, strict=True)
        return [times(one if clips else torch.ones_like(one), self.inv_scale) for one, clips in by_slot]


class DeviceVerdict(Verdict):
    """The verdict on one step, decided on the device."""

    def __init__(self, decided: Decided, objections: Objections, terms: Terms, device: Device):
        super().__init__(decided.numbers, objections, terms, device)
        self._decided = decided
        self.skip = decided.skip

    @property
    def overflow(self) -> Tensor:
        return self._decided.overflow

    @property
    def has_error(self) -> Tensor:
        return self._decided.has_error

    def scales(self, max_norm: float, clips: Sequence[bool]) -> Sequence[Tensor]:
        return self._decided.scales(max_norm, clips)


def verdict_of(
    numbers: Tensor, objections: Objections, inv_scale: float | Tensor, limits: Limits, device: Device
) -> Verdict:
    """The verdict on `numbers`, the result of `reduce_stats`: on the device if it is asynchronous, else on the host."""
    terms = Terms(len(limits.slots), inv_scale, limits.skip_above)
    if not device.is_asynchronous:
        return Verdict(numbers, objections, terms, device)
    return DeviceVerdict(Decided.of(numbers, objections.group_check, terms), objections, terms, device)


def _judged(sums: Sums, *, inv_scale: float, skip_above: float) -> Findings:
    norms = [math.sqrt(square) if square >= 0 else math.nan for square in sums.squares]
    if sums.num_nonfinite:
        # Norms may be finite: the element is in a copy that is not counted, or is finite in float64.
        norms = [norm if not math.isfinite(norm) else math.inf for norm in norms]
    overflow = bool(sums.num_nonfinite) or not all(map(math.isfinite, norms))
    unscaled = tuple(norm * inv_scale for norm in norms)
    return Findings(overflow, unscaled[0] > skip_above, int(sums.num_zeros), unscaled)


def _moved_in_words(left: ParamId | None, num_ranks: int) -> str:
    which = f"parameter {str(left)!r}" if left is not None else f"a parameter on {num_ranks} other rank(s)"
    return (
        f"{which} has left the memory that the optimizer updates: the model was converted or moved, or param.data was "
        "assigned, after the optimizer was built; convert and move the model first, then build the optimizer. Nothing "
        "was updated"
    )
