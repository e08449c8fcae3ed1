"""`Outcome`: the result of a step as the host reads it; its errors are raised once, or reported if nobody asks.

On an accelerator a step returns before its errors are known. Reading its result raises them, and so does the next step.
Without a next step, a save warns of them, and so does the end of the process. If the optimizer is deleted before, the
next optimizer that is built or saved warns: garbage may be collected at any time, also while a graph is captured, when
nothing may look at the device.
"""

import atexit
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, overload
from weakref import ref

from opt_distributed.comm.device import Device, HostCopy
from opt_distributed.step.guards.guard import Guard
from opt_distributed.step.verdict import Report, Verdict

WAIT_SECONDS = 5.0  # for the statistics of a step at the end; a collective whose peer has died never completes


class Outcome:
    """The outcome of one step. With `is_unread`, its error is still to be raised or reported."""

    def __init__(
        self, verdict: Verdict, guards: Sequence[Guard], *, step: int, device: Device, owner: object, is_unread: bool
    ):
        """`owner` makes the steps; it is not kept alive."""
        self._guards, self._step, self._owner = guards, step, ref(owner)
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

    def read(self) -> Report:
        """Return the content of the verdict, for which the host waits. Raises the error of the first guard."""
        _unread.discard(self)
        report, error = self._known()
        if error is not None:
            raise error
        return report

    def sums_of(self, guard: Guard) -> list[float]:
        """The sums of a guard's flags, for which the host waits."""
        at = sum(other.num_flags for other in self._guards[: self._guards.index(guard)])
        return self._known()[0].flags[at : at + guard.num_flags]

    def _known(self) -> tuple[Report, Exception | None]:
        if self._report is None:
            numbers = self._copy.wait().tolist()
            report = Report.of(numbers, num_slots=self._num_slots, num_guards=len(self._guards))
            self._error = self._first_error(report)
            if (
                self._error is None and not self._device.is_asynchronous
            ):  # `WrittenReplicas` has compared, and they are equal
                report = report._replace(wrong=[])
            self._report = report
        return self._report, self._error

    def _first_error(self, report: Report) -> Exception | None:
        at = 0
        for guard, wrong in zip(self._guards, report.wrong, strict=True):
            error = guard.error(report.flags[at : at + guard.num_flags]) if wrong else None
            if error is not None:
                return error
            at += guard.num_flags
        return None

    def warn(self, when: str, *, within: float | None = None) -> None:
        """Warn once if its error is unread; the next step still raises it.

        The host waits for the statistics of the step, at most `within` seconds if that is given.
        """
        if not self.is_unread or self._is_reported or (within is not None and not self._copy.arrives(within)):
            return
        self._is_reported = True
        _, error = self._known()
        if error is not None:
            warnings.warn(
                f"{when}: step {self._step} was refused, and its result has not been read: {error}",
                RuntimeWarning,
                stacklevel=4,
            )

    @property
    def is_orphan(self) -> bool:
        """Whether the object that made the step was deleted."""
        return self._owner() is None


_unread: set[Outcome] = set()


def warn_of_deleted() -> None:
    """Warn of errors in the last steps of deleted optimizers."""
    for outcome in list(_unread):
        if outcome.is_orphan:
            outcome.warn("the optimizer was deleted", within=WAIT_SECONDS)
            _unread.discard(outcome)


@atexit.register
def _warn_at_exit() -> None:
    warn_of_deleted()
    for outcome in list(_unread):
        outcome.warn("the interpreter exits", within=WAIT_SECONDS)
        _unread.discard(outcome)


class _Values(NamedTuple):
    success: bool
    grad_norm: float
    num_zeros_in_grad: int | None


class StepResult(Sequence[Any]):
    """The triple (success, grad_norm, num_zeros_in_grad), the same on every rank.

    On an accelerator, the first access waits for the statistics of the step, but not for its update, and raises the
    errors that the step would have raised on a CPU. If a result is never accessed, the next step raises its errors.
    Until then, saving the state warns of them, and so does the end of the optimizer or of the interpreter.
    """

    __slots__ = ("_read", "_values")

    def __init__(self, success: bool, grad_norm: float, num_zeros_in_grad: int | None):
        self._values: _Values | None = _Values(success, grad_norm, num_zeros_in_grad)
        self._read: Callable[[], tuple[bool, float, int | None]] | None = None

    @classmethod
    def later(cls, read: Callable[[], tuple[bool, float, int | None]]) -> "StepResult":
        """Create a result whose values are returned by `read`, which is called once."""
        result = cls.__new__(cls)
        result._values, result._read = None, read
        return result

    @property
    def success(self) -> bool:
        """False after an overflow or with a norm above the limit: only the loss scale has changed."""
        return self._known.success

    @property
    def grad_norm(self) -> float:
        """L2 norm of the mean gradient, without loss scale, before clipping; infinite or NaN after an overflow."""
        return self._known.grad_norm

    @property
    def num_zeros_in_grad(self) -> int | None:
        """None unless zeros are counted."""
        return self._known.num_zeros_in_grad

    @property
    def _known(self) -> _Values:
        if self._values is None:
            assert self._read is not None
            self._values, self._read = _Values(*self._read()), None
        return self._values

    @overload
    def __getitem__(self, index: int) -> Any: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...

    def __getitem__(self, index: int | slice) -> Any:
        return self._known[index]

    def __len__(self) -> int:
        return 3

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, StepResult | tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._known)

    def __repr__(self) -> str:
        return "StepResult" + repr(self._known).removeprefix("_Values")

    def __reduce__(self) -> tuple[Any, ...]:
        return StepResult, tuple(self._known)
