"""What our schedulers share: a step count, groups read anew, and the attributes that trainers look for."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import ScheduleError
from .fields import Group, Optimizers, groups_of


class GroupScheduler(ABC):
    """Counts steps and keeps the parameter groups of an optimizer, or of a list of them, at their values.

    Has what trainers ask of a scheduler that is not torch's (`optimizer`, `base_lrs`, `last_epoch`, `get_last_lr`,
    `step` and the state dict). Those that insist on torch's class get it from
    `opt_scheduler.lr_scheduler.as_lr_scheduler`.
    """

    def __init__(self, optimizer: Optimizers) -> None:
        self.optimizer = optimizer
        self.num_steps: float = 0

    def step(self, increment: float = 1) -> None:
        """Count `increment` steps (or samples, or tokens) more, and write the groups.

        Raises:
            ScheduleError: a negative increment; `seek` goes back. Or a group whose overrides cannot be, and then
            neither
                the count nor any group has changed.
        """
        if not 0 <= increment < math.inf:
            raise ScheduleError(f"step: increment={increment!r} must be at least 0 and finite; seek() can go back")
        self._move(self.num_steps + increment)

    def seek(self, num_steps: float) -> None:
        """Go to `num_steps`, forwards or backwards, and write the groups.

        Raises:
            ScheduleError: a negative count.
        """
        if not 0 <= num_steps < math.inf:
            raise ScheduleError(f"seek: num_steps={num_steps!r} must be at least 0 and finite")
        self._move(num_steps)

    def _move(self, num_steps: float) -> None:
        self._write(groups_of(self.optimizer), num_steps)
        self.num_steps = num_steps

    @property
    def param_groups(self) -> list[Group]:
        """The groups, as they are now."""
        return groups_of(self.optimizer)

    @property
    def last_epoch(self) -> float:
        """`num_steps` under torch's name for it."""
        return self.num_steps

    @property
    def base_lrs(self) -> list[float]:
        """For each group the learning rate that its schedule is a multiple of."""
        return [self._base_lr(group) for group in self.param_groups]

    def get_last_lr(self) -> list[float]:
        """For each group the learning rate that it has now."""
        return [float(group["lr"]) for group in self.param_groups]

    @abstractmethod
    def _write(self, groups: Sequence[Group], num_steps: float) -> None:
        """Set every group to its values at `num_steps`, all of them or none."""

    @abstractmethod
    def _base_lr(self, group: Group) -> float: ...

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """All that cannot be recomputed, in plain types."""

    @abstractmethod
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set everything to what `state_dict` says, or on an error nothing."""
