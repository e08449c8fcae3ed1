"""What follows from a verdict: `Outcome`, what the host learns of a step; `StepResult`; `Scaler`, the next loss scale.

On an accelerator a step returns before its errors are known: reading its result raises them, and so does the next step.
Without a next step, a save warns of them, and so does the end of the process. If the optimizer is deleted before, the
next optimizer that is built or saved warns: garbage may be collected at any time, also while a graph is captured, when
nothing may look at the device.
"""

import atexit
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor

from opt_config import ConstantScale, DynamicScale, NoScale
from opt_distributed.comm.device import Device, HostCopy
from opt_distributed.step.guard import Guard
from opt_distributed.step.verdict import Report, Verdict

MAX_SCALE = torch.finfo(torch.float32).max
"""A dynamic loss scale does not grow beyond this: a scaled fp32 loss would overflow in every step until it is back."""
WAIT_SECONDS = 5.0  # for the statistics of a step at the end; a collective whose peer has died never completes


class Outcome:
    """The outcome of one step. With `is_unread`, its error is still to be raised or reported."""

    def __init__(
        self, verdict: Verdict, guards: Sequence[Guard], step: int, device: Device, *, owner: object, is_unread: bool
    ):
        """`owner` makes the steps; it is not kept alive."""
        self._guards = guards
        self.step = step
        self.owner = ref(owner)
        self._num_slots = len(verdict.norms)
        self._copy = HostCopy(verdict.report, device)
        self._device = device
        self._report: Report | None = None
        self.error: Exception | None = None  # of the first guard that refused the step, once the host knows the report
        self._is_reported = False
        if is_unread:
            _unread.add(self)

    @property
    def is_unread(self) -> bool:
        """Whether its error, if there is one, has not been raised yet."""
        return self in _unread

    def resolve(self) -> Report:
        """Read the verdict, for which the host waits, and find its error, which stays to be raised.

        The error is that of the first guard that refused the step and does not withdraw. Collective on a CPU if a guard
        compares ranks before it answers: every rank resolves the step in the same call.
        """
        if self._report is None:
            report = Report.of(self._copy.wait().tolist(), self._guards, num_slots=self._num_slots)
            for guard, wrong, sums in zip(self._guards, report.wrong, report.sums, strict=True):
                if wrong and self.error is None:
                    self.error = guard.error(sums)
            if self.error is None and not self._device.is_asynchronous:
                report = report._replace(wrong=[])  # all guards have withdrawn, and the step is made
            self._report = report
        return self._report

    def arrives(self, within: float) -> bool:
        """Wait at most `within` seconds for the verdict. Return whether the host has it."""
        return self._copy.arrives(within)

    def read(self) -> Report:
        """Return the content of the verdict, for which the host waits. Raises the error of the first guard."""
        _unread.discard(self)
        report = self.resolve()
        if self.error is not None:
            raise self.error
        return report

    def sums_of(self, guard: Guard) -> list[float]:
        """The sums of a guard's flags, for which the host waits."""
        return self.resolve().sums[self._guards.index(guard)]

    def warn(self, when: str, *, within: float | None = None) -> None:
        """Warn once if its error is unread; the next step still raises it.

        The host waits for the statistics of the step, at most `within` seconds if that is given.
        """
        if not self.is_unread or self._is_reported or (within is not None and not self.arrives(within)):
            return
        self.resolve()
        self._is_reported = True
        if self.error is not None:
            warnings.warn(
                f"{when}: step {self.step} was refused, and its result has not been read: {self.error}",
                RuntimeWarning,
                stacklevel=4,
            )


_unread: set[Outcome] = set()


def warn_of_deleted() -> None:
    """Warn of errors in the last steps of deleted optimizers."""
    _warn_of([outcome for outcome in _unread if outcome.owner() is None], "the optimizer was deleted")


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
        """Whether the update was made. If not (`verdict.REASONS`), no parameter or state has changed."""
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


# --- the loss scale ---------------------------------------------------------------------------------------------------


class Scaler:
    """The factor by which the loss is multiplied: a constant, or with a `rule` dynamic.

    A dynamic scale grows after `window` steps without overflow; it backs off after `hysteresis` overflows since it last
    grew. Growth stops below `MAX_SCALE`, which it reaches only where no gradient arrives. As in Megatron-Core,
    a backoff does not reset the hysteresis count: every further overflow backs off again,
    until a full window of steps without overflow grows the scale and resets the count.

    The host knows the state until a device first decides whether a step overflowed. From then on the state is a tensor
    on the device, always the same one, and reading it waits.
    """

    def __init__(self, scale: float, rule: DynamicScale | None = None):
        self.rule = rule
        hysteresis = 0 if rule is None else rule.hysteresis
        self._known: list[float] | None = [float(scale), 0.0, float(hysteresis)]
        self._on_device: Tensor | None = None  # (3,) float64, the state if `_known` is None

    @property
    def state(self) -> list[float]:
        """The scale; steps without overflow since it last grew or one was seen; overflows until it backs off."""
        if self._known is not None:
            return self._known
        assert self._on_device is not None
        return cast(list[float], self._on_device.tolist())

    @property
    def factor(self) -> float | Tensor:
        """The scale as a number, or as a 0-d float64 tensor if the host would have to wait for the number."""
        if self._known is not None:
            return self._known[0]
        assert self._on_device is not None
        return self._on_device[0].clone()  # autograd may keep it beyond the next step

    @property
    def inverse(self) -> float | Tensor:
        """`1 / factor`, likewise. A tensor keeps its value when the scale changes."""
        return 1.0 / self.factor

    def update(self, found_inf: bool | Tensor, *, unless: Tensor | None = None) -> None:
        """Update the scale, once per step after the verdict. Flags are bools or 0-d bool tensors, equal on all ranks.

        If `unless` is set, nothing changes.
        """
        if self.rule is None:
            return
        if not isinstance(found_inf, Tensor):
            before = torch.tensor(self.state, dtype=torch.float64, device="cpu")
            flag = torch.tensor(found_inf, dtype=torch.bool, device="cpu")
            self._known = _rescaled(before, flag, None, self.rule).tolist()
            return
        if self._known is not None:  # without a copy from the host, for which it would wait
            known = [torch.full_like(found_inf, number, dtype=torch.float64) for number in self._known]
            self._keep(torch.stack(known))
        assert self._on_device is not None
        self._on_device.copy_(_rescaled(self._on_device, found_inf, unless, self.rule))

    def stay_on(self, device: Device) -> None:
        """Keep the state in one tensor on `device` from now on, as graphs require. Called before every replay."""
        if self.rule is not None and self._known is not None:
            self._keep(device.upload(torch.tensor(self._known, dtype=torch.float64, device="cpu")))

    def _keep(self, state: Tensor) -> None:
        """Keep the state on the device of `state`."""
        if self._on_device is None:
            with torch.inference_mode(False):  # a step outside of inference mode must be able to write it, too
                self._on_device = state.clone()
        else:
            self._on_device.copy_(state)
        self._known = None

    def state_dict(self) -> dict[str, Any]:
        """What changes; empty for a constant."""
        if self.rule is None:
            return {}
        scale, clean, forgiven = self.state
        return {"scale": scale, "growth_tracker": int(clean), "hysteresis_tracker": int(forgiven)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set scale and both counts, unless the scale is constant. Accepts tensors of one element: Megatron-Core saves
        its scale as one.

        Raises:
            ValueError: the scale is not a finite number above 0; with it, every later step would be skipped.
        """
        if self.rule is None:
            return
        scale = float(state["scale"])
        if not 0 < scale < math.inf:
            raise ValueError(f"scale={scale}: a loss scale must be a finite number above 0")
        self._known = [scale, float(int(state["growth_tracker"])), float(int(state["hysteresis_tracker"]))]


def _rescaled(before: Tensor, found_inf: Tensor, unless: Tensor | None, rule: DynamicScale) -> Tensor:
    """The next state (3,) of the scale, as `before`, in new memory. Nothing changes if `unless` is true."""
    where = torch.where
    scale, clean, forgiven = before.unbind()
    grows = clean + 1 >= rule.window
    grown = scale * rule.growth
    grown = where(grown <= MAX_SCALE, grown, scale)
    backed_off = (scale * rule.backoff).clamp(min=rule.minimum)
    after_overflow = where(forgiven <= 1, backed_off, scale)
    next_scale = where(found_inf, after_overflow, where(grows, grown, scale))
    next_clean = where(found_inf | grows, 0.0, clean + 1)
    next_forgiven = where(found_inf, forgiven - 1, where(grows, float(rule.hysteresis), forgiven))
    after = torch.stack([next_scale, next_clean, next_forgiven])
    return after if unless is None else where(unless, before, after)


def scaler_of(choice: NoScale | ConstantScale | DynamicScale) -> Scaler:
    """Create the scaler for a configuration's choice."""
    if isinstance(choice, DynamicScale):
        return Scaler(choice.initial, choice)
    return Scaler(choice.scale if isinstance(choice, ConstantScale) else 1.0)
