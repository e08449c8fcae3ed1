"""`Verdict`: norms, overflow and errors of a step, decided by torch's operations on the device; `Outcome`: on the host.

The update takes its skip flag and scales from the verdict. The host reads one copy of it, `report`, when somebody asks:
at once on a CPU. On an accelerator a step returns before its errors are known: reading its result raises them, and so
does the next step. Without a next step, a save warns of them, and so does the end of the process. If the optimizer is
deleted before, the next optimizer that is built or saved warns: garbage may be collected at any time, also while a
graph is captured, when nothing may look at the device.
"""

import atexit
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast
from weakref import ref

import torch
from torch import Tensor

from opt_distributed.comm.device import Device, HostCopy
from opt_distributed.step.guards.guard import Guard

Scale = TypeVar("Scale", bound=float | Tensor)
WAIT_SECONDS = 5.0  # for the statistics of a step at the end; a collective whose peer has died never completes


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


class Outcome:
    """The outcome of one step. With `is_unread`, its error is still to be raised or reported."""

    def __init__(
        self, verdict: Verdict, guards: Sequence[Guard], step: int, device: Device, *, owner: object, is_unread: bool
    ):
        """`owner` makes the steps; it is not kept alive."""
        self._guards, self.step, self._owner = guards, step, ref(owner)
        self._num_slots = len(verdict.norms)
        self._copy, self._device = HostCopy(verdict.report, device), device
        self._report: Report | None = None
        self._error: Exception | None = None
        self._is_reported = False
        if is_unread:
            _unread.add(self)

    @property
    def is_unread(self) -> bool:
        """Whether its error, if there is one, has not been raised yet."""
        return self in _unread

    @property
    def was_refused(self) -> bool:
        """Whether its error is known. The host does not wait."""
        return self._error is not None

    @property
    def is_orphan(self) -> bool:
        """Whether the object that made the step was deleted."""
        return self._owner() is None

    @property
    def report(self) -> Report:
        """The content of the verdict, for which the host waits. Its error stays to be raised."""
        return self._known()

    def arrives(self, within: float) -> bool:
        """Wait at most `within` seconds for the verdict. Return whether the host has it."""
        return self._copy.arrives(within)

    def read(self) -> Report:
        """Return the content of the verdict, for which the host waits. Raises the error of the first guard."""
        _unread.discard(self)
        report = self._known()
        if self._error is not None:
            raise self._error
        return report

    def sums_of(self, guard: Guard) -> list[float]:
        """The sums of a guard's flags, for which the host waits."""
        return self._split(self._known().flags)[self._guards.index(guard)]

    def _split(self, flags: list[float]) -> list[list[float]]:
        numbers = iter(flags)
        return [[next(numbers) for _ in range(guard.num_flags)] for guard in self._guards]

    def _known(self) -> Report:
        if self._report is None:
            numbers = self._copy.wait().tolist()
            report = Report.of(numbers, num_slots=self._num_slots, num_guards=len(self._guards))
            for guard, wrong, sums in zip(self._guards, report.wrong, self._split(report.flags), strict=True):
                self._error = self._error or (guard.error(sums) if wrong else None)
            if self._error is None and not self._device.is_asynchronous:
                report = report._replace(wrong=[])  # `WrittenReplicas` has compared, and they are equal
            self._report = report
        return self._report

    def warn(self, when: str, *, within: float | None = None) -> None:
        """Warn once if its error is unread; the next step still raises it.

        The host waits for the statistics of the step, at most `within` seconds if that is given.
        """
        if not self.is_unread or self._is_reported or (within is not None and not self.arrives(within)):
            return
        self._is_reported = True
        self._known()
        if self._error is not None:
            warnings.warn(
                f"{when}: step {self.step} was refused, and its result has not been read: {self._error}",
                RuntimeWarning,
                stacklevel=4,
            )


_unread: set[Outcome] = set()


def warn_of_deleted() -> None:
    """Warn of errors in the last steps of deleted optimizers."""
    _warn_of([outcome for outcome in _unread if outcome.is_orphan], "the optimizer was deleted")


@atexit.register
def _warn_at_exit() -> None:
    warn_of_deleted()
    _warn_of(list(_unread), "the interpreter exits")


def _warn_of(outcomes: Iterable[Outcome], when: str) -> None:
    for outcome in outcomes:
        outcome.warn(when, within=WAIT_SECONDS)
        _unread.discard(outcome)


Values = tuple[bool, float, int | None]


class StepResult(Sequence[Any]):
    """The triple (success, grad_norm, num_zeros_in_grad), the same on every rank.

    On an accelerator, the first access waits for the statistics of the step, but not for its update, and raises the
    errors that the step would have raised on a CPU. If a result is never accessed, the next step raises its errors.
    Until then, saving the state warns of them, and so does the end of the optimizer or of the interpreter.
    """

    __slots__ = ("_values",)
    _values: Values | Callable[[], Values]

    def __init__(self, success: bool, grad_norm: float, num_zeros_in_grad: int | None):
        self._values = (success, grad_norm, num_zeros_in_grad)

    @classmethod
    def later(cls, read: Callable[[], Values]) -> "StepResult":
        """Create a result whose values are returned by `read`, which is called once."""
        result = cls.__new__(cls)
        result._values = read
        return result

    @property
    def success(self) -> bool:
        """False after an overflow or with a norm above the limit: only the loss scale has changed."""
        return self._known()[0]

    @property
    def grad_norm(self) -> float:
        """L2 norm of the mean gradient, without loss scale, before clipping; infinite or NaN after an overflow."""
        return self._known()[1]

    @property
    def num_zeros_in_grad(self) -> int | None:
        """None unless zeros are counted."""
        return self._known()[2]

    def _known(self) -> Values:
        if callable(self._values):
            self._values = self._values()
        return self._values

    def __getitem__(self, index: Any) -> Any:
        return self._known()[index]

    def __len__(self) -> int:
        return 3

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, StepResult | tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._known())

    def __repr__(self) -> str:
        return "StepResult(success={!r}, grad_norm={!r}, num_zeros_in_grad={!r})".format(*self)

    def __reduce__(self) -> tuple[Any, ...]:
        return StepResult, self._known()
