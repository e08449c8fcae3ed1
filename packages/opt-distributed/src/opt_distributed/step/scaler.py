"""Loss scaling: none, constant, or dynamic with hysteresis. A small state machine on the host; no tensors."""

from typing import Any, Protocol

from opt_config import ConstantScale, DynamicScale, NoScale


class Scaler(Protocol):
    """What the loss is multiplied by, and how that changes after each step's verdict."""

    @property
    def scale(self) -> float: ...

    def update(self, found_inf: bool) -> None:
        """Once per step, after the verdict of all ranks: the same call with the same flag on every rank."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class ConstantScaler:
    """A scale that never changes; 1.0 where there is no scaling."""

    def __init__(self, scale: float = 1.0):
        self.scale = scale

    def update(self, found_inf: bool) -> None:
        return None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return None


class DynamicScaler:
    """Grows after `window` clean steps; backs off once `hysteresis` overflows were seen since it last grew.

    Like the reference, the hysteresis count is not refilled by a backoff: every further overflow backs off again,
    until a full window of clean steps grows the scale and refills it.
    """

    def __init__(self, rule: DynamicScale):
        self.rule = rule
        self.scale = float(rule.initial)
        self.growth_tracker = 0  # clean steps since the scale last changed or an overflow was seen
        self.hysteresis_tracker = rule.hysteresis  # overflows still forgiven

    def update(self, found_inf: bool) -> None:
        if found_inf:
            self.growth_tracker = 0
            self.hysteresis_tracker -= 1
            if self.hysteresis_tracker <= 0:
                self.scale = max(self.scale * self.rule.backoff, self.rule.minimum)
            return
        self.growth_tracker += 1
        if self.growth_tracker >= self.rule.window:
            self.growth_tracker = 0
            self.hysteresis_tracker = self.rule.hysteresis
            self.scale *= self.rule.growth

    def state_dict(self) -> dict[str, Any]:
        return {
            "scale": self.scale,
            "growth_tracker": self.growth_tracker,
            "hysteresis_tracker": self.hysteresis_tracker,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets all three. Tensors of one element are understood: the reference saves its scale as one."""
        self.scale = float(state["scale"])
        self.growth_tracker = int(state["growth_tracker"])
        self.hysteresis_tracker = int(state["hysteresis_tracker"])


def scaler_of(choice: NoScale | ConstantScale | DynamicScale) -> Scaler:
    """The scaler a configuration's choice stands for."""
    match choice:
        case DynamicScale():
            return DynamicScaler(choice)
        case ConstantScale(scale=scale):
            return ConstantScaler(scale)
        case NoScale():
            return ConstantScaler()
