"""Learning-rate and weight-decay schedules as pure functions of the step."""

from .compose import clip, cooldown, cut, join, repeat, scale, shift, stretch, warmup
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
from .override import ParamGroupOverride, combine_param_group_overrides, param_group_override_to_tuple
from .recipes import cyclic, one_cycle, piecewise_constant, step_decay, wsd
from .schedule import Schedule

__version__ = "0.1.0"
