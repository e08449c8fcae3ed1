"""Reading hyper-parameters from `param_groups`, at every step: one row of the table for each group."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from torch import Tensor

from opt_kernels.works import Hyper

FIELDS = tuple(field.name for field in fields(Hyper) if field.name not in ("step", "own"))


def check_rate(group: Mapping[str, Any]) -> None:
    """Raise ValueError if the group has no learning rate yet."""
    if group["lr"] is None:
        raise ValueError(f"lr of group {group['name']!r} is None: set lr in the configuration, or attach a scheduler")


def read_hyper(group: Mapping[str, Any], *, step: int | Tensor, own: Sequence[str] = ()) -> Hyper:
    """Return a group's row for this step (counted from 1). Fields that the group lacks have their defaults.

    `own` names further entries that the rule reads.

    Raises ValueError if the group has no learning rate yet.
    """
    check_rate(group)
    numbers = {name: group[name] for name in FIELDS if name in group}
    return Hyper(step=step, own={name: group[name] for name in own}, **numbers)
