"""The base class of the schedulers: a step count, groups read at every step, and the attributes trainers look for."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .errors import ScheduleError
from .fields import Group, Optimizers, groups_of

VERSION = 1  # of the states; those of Megatron-Core have none


def check_state(where: str, state: Mapping[str, Any], keys: Iterable[str]) -> None:
    """Raise `ScheduleError` if `state` lacks one of `keys` or is of a newer version."""
    if missing := sorted(set(keys) - set(state)):
        raise ScheduleError(f"{where}: the state lacks {missing}; it has {sorted(state)}")
    if (version := state.get("version", VERSION)) > VERSION:
        raise ScheduleError(f"{where}: {version=} of the state is newer than {VERSION}, the last that is read here")


class GroupScheduler(ABC):
    """Counts steps and writes the values for the present step into the groups of one optimizer, or of a list of them.

    Has the attributes and methods that trainers need of a scheduler that is not torch's: `optimizer`, `base_lrs`,
    `last_epoch`, `get_last_lr`, `step`, `state_dict` and `load_state_dict`. For trainers that accept only torch's
    class, use `opt_scheduler.as_lr_scheduler`.
    """

    def __init__(self, optimizer: Optimizers) -> None:
        self.optimizer = optimizer
        self.num_steps: float = 0

    def step(self, increment: float = 1) -> None:
        """Advance by `increment` steps (or samples, or tokens) and write the groups.

        Raises:
            ScheduleError: `increment` is negative (`seek` can go back), or a group has invalid overrides. Then neither
                the count nor any group has changed.
        """
        if not 0 <= increment < math.inf:
            raise ScheduleError(f"step: increment={increment!r} must be at least 0 and finite; seek() can go back")
        self.seek(self.num_steps + increment)

    def seek(self, num_steps: float) -> None:
        """Go to step `num_steps`, forwards or backwards, and write the groups.

        Raises:
            ScheduleError: `num_steps` is negative.
        """
        if not 0 <= num_steps < math.inf:
            raise ScheduleError(f"seek: num_steps={num_steps!r} must be at least 0 and finite")
        self._write(groups_of(self.optimizer), num_steps)
        self.num_steps = num_steps

    @property
    def param_groups(self) -> list[Group]:
        """The present groups."""
        return groups_of(self.optimizer)

    @property
    def last_epoch(self) -> float:
        """`num_steps` under torch's name for it."""
        return self.num_steps

    @property
    def base_lrs(self) -> list[float]:
        """The base learning rate of each group: the value that its schedule multiplies, or the schedule's peak."""
        return [self._base_lr(place, group) for place, group in enumerate(self.param_groups)]

    def get_last_lr(self) -> list[float]:
        """Return the present learning rate of each group."""
        return [float(group["lr"]) for group in self.param_groups]

    def writes_lr(self, group: Group) -> bool:
        """Whether a step sets the learning rate of `group`."""
        return True

    @abstractmethod
    def _write(self, groups: Sequence[Group], num_steps: float) -> None:
        """Set all groups to their values at `num_steps`, or on an error none."""

    @abstractmethod
    def _base_lr(self, place: int, group: Group) -> float: ...

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return everything that cannot be recomputed, in plain types."""

    @abstractmethod
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set everything to the saved state, or on an error nothing."""
