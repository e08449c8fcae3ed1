"""Reads a saved state, of this package or of any version of Megatron-Core, without changing anything."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from .errors import ScheduleError, is_number, refuse
from .group_scheduler import check_state
from .settings import Settings

# The keys under which checkpoints hold a field, oldest first; a state has one of them.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "max_lr": ("start_lr", "max_lr"),
    "min_lr": ("min_lr",),
    "lr_warmup_steps": ("warmup_iter", "warmup_steps", "lr_warmup_steps"),
    "lr_decay_steps": ("end_iter", "decay_steps", "lr_decay_steps"),
    "lr_decay_style": ("decay_style", "lr_decay_style"),
    "num_steps": ("num_iters", "num_steps"),
}


class SavedState(NamedTuple):
    """The step of the saved run, and the saved fields under their present names."""

    num_steps: float
    fields: dict[str, Any]


def read_state(state_dict: Mapping[str, Any]) -> SavedState:
    """Return the state under the present names, from the containers and keys of older checkpoints too.

    Raises:
        ScheduleError: missing fields (all are listed), an invalid step count, or a newer version.
    """
    for container in ("opt_param_scheduler", "lr_scheduler"):
        if isinstance(state_dict.get(container), Mapping):
            state_dict = state_dict[container]
    check_state("OptimizerParamScheduler", state_dict, ())
    keys_of = {name: next((key for key in keys if key in state_dict), None) for name, keys in _NAMES.items()}
    missing = [f"{name} is missing (keys: {', '.join(_NAMES[name])})" for name, key in keys_of.items() if key is None]
    refuse(missing, where="OptimizerParamScheduler: state")
    found = {name: state_dict[key] for name, key in keys_of.items() if key is not None}
    found |= {field.name: state_dict[field.name] for field in fields(Settings) if field.name in state_dict}
    num_steps = found.pop("num_steps")
    if not is_number(num_steps) or not num_steps >= 0:
        raise ScheduleError(f"OptimizerParamScheduler: state: num_steps={num_steps!r} must be a number, at least 0")
    return SavedState(num_steps, found)
