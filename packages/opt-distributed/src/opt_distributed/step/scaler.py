"""Loss scaling: none, constant, or dynamic with hysteresis. The state is on the device of the step."""

import math
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from opt_config import ConstantScale, DynamicScale, NoScale
from opt_distributed.comm.device import Device


class Scaler(Protocol):
    """The factor by which the loss is multiplied, and how it changes after each step."""

    @property
    def scale(self) -> float:
        """The scale as a number, for which the host may wait."""
        ...

    @property
    def factor(self) -> float | Tensor:
        """The scale as a number, or as a 0-d float64 tensor if the host would have to wait for the number."""
        ...

    @property
    def inverse(self) -> float | Tensor:
        """`1 / factor`, likewise. A tensor keeps its value when the scale changes."""
        ...

    def update(self, found_inf: bool | Tensor, *, unless: Tensor | None = None) -> None:
        """Update the scale, once per step after the verdict. Flags are bools or 0-d bool tensors, equal on all ranks.

        If `unless` is set, nothing changes.
        """
        ...

    def stay_on(self, device: Device) -> None:
        """Keep the state in one tensor on `device` from now on, as graphs require. Called before every replay."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class ConstantScaler:
    """A scale that never changes; 1.0 without scaling."""

    def __init__(self, scale: float = 1.0):
        self.scale = scale

    @property
    def factor(self) -> float:
        return self.scale

    @property
    def inverse(self) -> float:
        return 1.0 / self.scale

    def update(self, found_inf: bool | Tensor, *, unless: Tensor | None = None) -> None:
        return None

    def stay_on(self, device: Device) -> None:
        return None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return None


class DynamicScaler:
    """Grows after `window` steps without overflow; backs off after `hysteresis` overflows since it last grew.

    As in Megatron-Core, a backoff does not reset the hysteresis count: every further overflow backs off again, until a
    full window of steps without overflow grows the scale and resets the count.

    The host knows the state until a device first decides whether a step overflowed. From then on the state is a tensor
    on the device, and reading it waits.
    """

    def __init__(self, rule: DynamicScale):
        self.rule = rule
        self._known: _State | None = _State(float(rule.initial), 0, rule.hysteresis)
        self._on_device: Tensor | None = None  # (4,) float64: the state and 1 / scale, if `_known` is None
        self._stays = False  # whether `_on_device` is always the same tensor

    @property
    def state(self) -> "_State":
        """The state, on the host."""
        if self._known is not None:
            return self._known
        assert self._on_device is not None
        state = _State.of(self._on_device)
        if not self._stays:  # replays change it without the host, so it must not be cached
            self._known = state
        return state

    @property
    def scale(self) -> float:
        return self.state.scale

    @property
    def factor(self) -> float | Tensor:
        if self._known is not None:
            return self._known.scale
        assert self._on_device is not None
        return self._on_device[0]

    @property
    def inverse(self) -> float | Tensor:
        if self._known is not None:
            return 1.0 / self._known.scale
        assert self._on_device is not None
        return self._on_device[3].clone() if self._stays else self._on_device[3]

    def update(self, found_inf: bool | Tensor, *, unless: Tensor | None = None) -> None:
        if not isinstance(found_inf, Tensor):
            before = torch.tensor(self.state.numbers, dtype=torch.float64)
            self._known = _State.of(_rescaled(before, torch.tensor(found_inf), None, self.rule))
            return
        after = self._updated_on_device(found_inf, unless)
        if self._stays and self._known is None:
            assert self._on_device is not None
            self._on_device.copy_(after)
        else:
            self._on_device, self._known, self._stays = after, None, False

    @torch.no_grad()
    def stay_on(self, device: Device) -> None:
        if self._known is not None:
            state = device.upload(torch.tensor(self._known.numbers, dtype=torch.float64))
            self._on_device = self._on_device.copy_(state) if self._stays and self._on_device is not None else state
            self._known = None
        if not self._stays:
            assert self._on_device is not None
            self._on_device, self._stays = self._on_device.clone(), True

    @torch.no_grad()
    def _updated_on_device(self, found_inf: Tensor, unless: Tensor | None) -> Tensor:
        """The next state, in a new tensor, so that a copy of the scaler keeps its state."""
        if self._known is not None:
            numbers = self._known.numbers
            before = torch.stack([torch.full_like(found_inf, one, dtype=torch.float64) for one in numbers])
        else:
            assert self._on_device is not None
            before = self._on_device
        return _rescaled(before, found_inf, unless, self.rule)

    def state_dict(self) -> dict[str, Any]:
        scale, clean, forgiven = self.state
        return {"scale": scale, "growth_tracker": clean, "hysteresis_tracker": forgiven}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set scale and both counts. Accepts tensors of one element: Megatron-Core saves its scale as one.

        Raises:
            ValueError: the scale is not a finite number above 0; with it, every later step would be skipped.
        """
        scale = float(state["scale"])
        if not 0 < scale < math.inf:
            raise ValueError(f"scale={scale}: a loss scale must be a finite number above 0")
        self._known = _State(scale, int(state["growth_tracker"]), int(state["hysteresis_tracker"]))


class _State(NamedTuple):
    """The state of a dynamic scale."""

    scale: float
    growth_tracker: int  # steps without overflow since the scale last grew or an overflow was seen
    hysteresis_tracker: int  # overflows until the scale backs off

    @classmethod
    def of(cls, numbers: Tensor) -> "_State":
        """Read the state of a device."""
        scale, clean, forgiven, _ = numbers.tolist()
        return cls(scale, int(clean), int(forgiven))

    @property
    def numbers(self) -> tuple[float, float, float, float]:
        """The state as a device keeps it, with 1 / scale."""
        return self.scale, self.growth_tracker, self.hysteresis_tracker, 1.0 / self.scale


def _rescaled(before: Tensor, found_inf: Tensor, unless: Tensor | None, rule: DynamicScale) -> Tensor:
    """The next state (4,) of the scale, as `before`, in new memory. Nothing changes if `unless` is true."""
    where = torch.where
    scale, clean, forgiven, _ = before.unbind()
    grows = clean + 1 >= rule.window
    backed_off = (scale * rule.backoff).clamp(min=rule.minimum)
    grown = where(found_inf, where(forgiven <= 1, backed_off, scale), where(grows, scale * rule.growth, scale))
    after = torch.stack(
        [
            grown,
            where(found_inf | grows, 0.0, clean + 1),
            where(found_inf, forgiven - 1, where(grows, float(rule.hysteresis), forgiven)),
            1.0 / grown,
        ]
    )
    return after if unless is None else where(unless, before, after)


def scaler_of(choice: NoScale | ConstantScale | DynamicScale) -> Scaler:
    """Create the scaler for a configuration's choice."""
    match choice:
        case DynamicScale():
            return DynamicScaler(choice)
        case ConstantScale(scale=scale):
            return ConstantScaler(scale)
        case NoScale():
            return ConstantScaler()
