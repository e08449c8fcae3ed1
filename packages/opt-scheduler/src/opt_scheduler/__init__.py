"""Learning-rate and weight-decay schedules as pure functions of the step."""

from importlib import import_module
from typing import TYPE_CHECKING

from .compose import clip, cut, join, repeat, restarts, scale, shift, stretch
from .curves import (
    constant,
    cosine,
    exponential,
    inverse_sqrt,
    linear,
    minus_sqrt,
    piecewise_linear,
    polynomial,
    power,
    ramp,
    shifted_exponential,
)
from .errors import ScheduleError
from .field_scheduler import FieldSchedule, FieldScheduler
from .groups import ParamGroupOverride, combine_param_group_overrides, param_group_override_to_tuple
from .plateau import Plateau
from .recipes import (
    SCHEDULE_NAMES,
    cooldown,
    cyclic,
    get_schedule,
    one_cycle,
    piecewise_constant,
    schedule_signatures,
    step_decay,
    warmup,
    wsd,
)
from .schedule import Schedule, as_schedule
from .scheduler import OptimizerParamScheduler, get_canonical_lr_for_logging
from .units import Batch, Unit, extend, rescale, rescale_horizon

__version__ = "0.1.0"

__all__ = ["Schedule", "ScheduleError", "as_schedule"]
__all__ += [
    "constant", "cosine", "exponential", "inverse_sqrt", "linear", "minus_sqrt", "piecewise_linear", "polynomial",
    "power", "ramp", "shifted_exponential",
]  # fmt: skip
__all__ += ["clip", "cut", "extend", "join", "repeat", "rescale", "restarts", "scale", "shift", "stretch"]
__all__ += ["cooldown", "cyclic", "one_cycle", "piecewise_constant", "step_decay", "warmup", "wsd"]
__all__ += ["SCHEDULE_NAMES", "get_schedule", "schedule_signatures"]
__all__ += ["Batch", "Unit", "rescale_horizon"]
__all__ += ["FieldSchedule", "FieldScheduler", "OptimizerParamScheduler", "Plateau", "get_canonical_lr_for_logging"]
__all__ += ["ParamGroupOverride", "combine_param_group_overrides", "param_group_override_to_tuple"]

if TYPE_CHECKING:
    from .keras_callback import as_keras_callback as as_keras_callback
    from .lr_scheduler import as_lr_scheduler as as_lr_scheduler
else:
    _ADAPTERS = {"as_lr_scheduler": ("lr_scheduler", "torch"), "as_keras_callback": ("keras_callback", "keras")}

    def __getattr__(name: str) -> object:
        """Import an adapter at its first use: it needs torch or Keras. Raises AttributeError for other names."""
        if name not in _ADAPTERS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, package = _ADAPTERS[name]
        try:
            return getattr(import_module(f"{__name__}.{module}"), name)
        except ModuleNotFoundError as error:
            if error.name != package:
                raise
            message = f"opt_scheduler.{name} needs {package}, which is not installed: pip install {package}"
            raise ImportError(message, name=package) from error
