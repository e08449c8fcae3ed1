"""Reading hyper-parameters from `param_groups`, at every step: one row of the table for each group."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from operator import is_
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


class KeptHyper:
    """Returns the row of the last step again while its entries and its step are the same objects."""

    def __init__(self, own: Sequence[str] = ()):
        """`own` names further entries that the rule reads."""
        self._own = tuple(own)
        self._names = (*FIELDS, *self._own)
        self._entries: tuple[Any, ...] = ()  # of the row
        self._row: Hyper | None = None

    def read(self, group: Mapping[str, Any], *, step: int | Tensor) -> Hyper:
        """`read_hyper`. A tensor for `step` is one that is written in place."""
        if not isinstance(step, Tensor):
            return read_hyper(group, step=step, own=self._own)
        entries = (step, len(group), *map(group.get, self._names))
        if self._row is not None and all(map(is_, entries, self._entries)):
            return self._row
        row = read_hyper(group, step=step, own=self._own)
        self._entries, self._row = entries, row if all(map(_is_fixed, entries)) else None
        return row


def _is_fixed(value: Any) -> bool:
    """Whether a row may keep this value. The content of a list, for example, may change."""
    return value is None or isinstance(value, _FIXED) or (isinstance(value, tuple) and all(map(_is_fixed, value)))


_FIXED = (int, float, str, Tensor)
