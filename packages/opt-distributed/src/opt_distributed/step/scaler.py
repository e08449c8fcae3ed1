"""Loss scaling: none, constant, or dynamic with hysteresis. The state is on the device of the step."""

import math
from typing import Any, cast

import torch
from torch import Tensor

from opt_config import ConstantScale, DynamicScale, NoScale
from opt_distributed.comm.device import Device


class Scaler:
    """The factor by which the loss is multiplied, and how it changes after each step: here, a constant."""

    def __init__(self, scale: float = 1.0):
        self._scale = scale

    @property
    def scale(self) -> float:
        """The scale as a number, for which the host may wait."""
        return self._scale

    @property
    def factor(self) -> float | Tensor:
        """The scale as a number, or as a 0-d float64 tensor if the host would have to wait for the number."""
        return self._scale

    @property
    def inverse(self) -> float | Tensor:
        """`1 / factor`, likewise. A tensor keeps its value when the scale changes."""
        return 1.0 / self.factor

    def update(self, found_inf: bool | Tensor, *, unless: Tensor | None = None) -> None:
        """Update the scale, once per step after the verdict. Flags are bools or 0-d bool tensors, equal on all ranks.

        If `unless` is set, nothing changes.
        """

    def stay_on(self, device: Device) -> None:
        """Keep the state in one tensor on `device` from now on, as graphs require. Called before every replay."""

    def state_dict(self) -> dict[str, Any]:
        """What changes; empty for a constant."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set what `state_dict` returned."""


class DynamicScaler(Scaler):
    """Grows after `window` steps without overflow; backs off after `hysteresis` overflows since it last grew.

    As in Megatron-Core, a backoff does not reset the hysteresis count: every further overflow backs off again, until a
    full window of steps without overflow grows the scale and resets the count.

    The host knows the state until a device first decides whether a step overflowed. From then on the state is a tensor
    on the device, always the same one, and reading it waits.
    """

    def __init__(self, rule: DynamicScale):
        self.rule = rule
        self._known: list[float] | None = [float(rule.initial), 0.0, float(rule.hysteresis)]
        self._on_device: Tensor | None = None  # (3,) float64, the state if `_known` is None

    @property
    def state(self) -> list[float]:
        """The scale; steps without overflow since it last grew or one was seen; overflows until it backs off."""
        if self._known is not None:
            return self._known
        assert self._on_device is not None
        return cast(list[float], self._on_device.tolist())

    @property
    def scale(self) -> float:
        return self.state[0]

    @property
    def factor(self) -> float | Tensor:
        if self._known is not None:
            return self._known[0]
        assert self._on_device is not None
        return self._on_device[0].clone()  # autograd may keep it beyond the next step

    @torch.no_grad()
    def update(self, found_inf: bool | Tensor, *, unless: Tensor | None = None) -> None:
        if not isinstance(found_inf, Tensor):
            before = torch.tensor(self.state, dtype=torch.float64)
            self._known = _rescaled(before, torch.tensor(found_inf), None, self.rule).tolist()
            return
        if self._known is not None:  # without a copy from the host, for which it would wait
            before = torch.stack([torch.full_like(found_inf, x, dtype=torch.float64) for x in self._known])
            self._keep_on_device(before)
        assert self._on_device is not None
        self._on_device.copy_(_rescaled(self._on_device, found_inf, unless, self.rule))

    def stay_on(self, device: Device) -> None:
        if self._known is not None:
            self._keep_on_device(device.upload(torch.tensor(self._known, dtype=torch.float64)))

    @torch.no_grad()
    def _keep_on_device(self, state: Tensor) -> None:
        if self._on_device is None:
            with torch.inference_mode(False):  # a step outside of inference mode must be able to write it, too
                self._on_device = state.clone()
        else:
            self._on_device.copy_(state)
        self._known = None

    def state_dict(self) -> dict[str, Any]:
        scale, clean, forgiven = self.state
        return {"scale": scale, "growth_tracker": int(clean), "hysteresis_tracker": int(forgiven)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set scale and both counts. Accepts tensors of one element: Megatron-Core saves its scale as one.

        Raises:
            ValueError: the scale is not a finite number above 0; with it, every later step would be skipped.
        """
        scale = float(state["scale"])
        if not 0 < scale < math.inf:
            raise ValueError(f"scale={scale}: a loss scale must be a finite number above 0")
        self._known = [scale, float(int(state["growth_tracker"])), float(int(state["hysteresis_tracker"]))]


def _rescaled(before: Tensor, found_inf: Tensor, unless: Tensor | None, rule: DynamicScale) -> Tensor:
    """The next state (3,) of the scale, as `before`, in new memory. Nothing changes if `unless` is true."""
    where = torch.where
    scale, clean, forgiven = before.unbind()
    grows = clean + 1 >= rule.window
    backed_off = (scale * rule.backoff).clamp(min=rule.minimum)
    after = torch.stack(
        [
            where(found_inf, where(forgiven <= 1, backed_off, scale), where(grows, scale * rule.growth, scale)),
            where(found_inf | grows, 0.0, clean + 1),
            where(found_inf, forgiven - 1, where(grows, float(rule.hysteresis), forgiven)),
        ]
    )
    return after if unless is None else where(unless, before, after)


def scaler_of(choice: NoScale | ConstantScale | DynamicScale) -> Scaler:
    """Create the scaler for a configuration's choice."""
    match choice:
        case DynamicScale():
            return DynamicScaler(choice)
        case ConstantScale(scale=scale):
            return Scaler(scale)
        case NoScale():
            return Scaler()
