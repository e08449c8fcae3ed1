"""The adapter to torch: the schedulers of this package as a `torch.optim.lr_scheduler.LRScheduler`.

The only module that imports torch. Who steps the adapter, and how often:

- In your own loop, call `step()` after `optimizer.step()`, once per update.
- Lightning steps once per update if `configure_optimizers` returns {"scheduler": ..., "interval": "step"}; its default
  is once per epoch. Without the adapter it asks for a hook `lr_scheduler_step` that calls `scheduler.step()`.
- The HF Trainer takes `optimizers=(optimizer, scheduler)` and steps once per update, except for a skipped one.
- Accelerate, after `prepare(scheduler)`, steps `num_processes` times per update (once with `split_batches=True`), and
  not at all if the update was skipped. To step once per update, do not prepare the scheduler; or let the schedule count
  the batches of one process.

torch's OneCycleLR stores `max_lr` and `min_lr` in the groups, which would look like overrides: an
`OptimizerParamScheduler` refuses such groups, when it is built and at every step. A `FieldScheduler` ignores them.
"""

from copy import deepcopy
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .errors import ScheduleError
from .field_scheduler import FieldScheduler, Schedules
from .groups import GroupScheduler, check_state
from .plateau import Plateau
from .schedule import Plain


class _Adapter(LRScheduler):
    """Counts as torch does and lets `scheduler` write the groups: every scheduled field, not only the learning rate.

    What it writes depends on `last_epoch` alone, as with torch's LambdaLR, so that it may be a part of SequentialLR,
    which sets `last_epoch` back, and of ChainedScheduler.
    """

    def __init__(self, scheduler: GroupScheduler, optimizer: Optimizer, *, increment: float) -> None:
        self.scheduler = scheduler
        self.increment = increment
        self._epoch = 0  # the `last_epoch` that belongs to the present step of `scheduler`
        self._last_epoch = -1
        # torch would store the present lr, often 0 during warmup, as the base that other schedulers multiply.
        self._bases = scheduler.base_lrs
        for group, base_lr in zip(optimizer.param_groups, self._bases, strict=True):
            if not float(group.get("initial_lr", 0.0)):
                group["initial_lr"] = base_lr
        super().__init__(optimizer)

    @property
    def last_epoch(self) -> int:
        """The number of steps since this scheduler began; -1 while it waits for its milestone in a SequentialLR."""
        return self._last_epoch

    @last_epoch.setter
    def last_epoch(self, epoch: int) -> None:
        # SequentialLR takes back the first step of its parts when it is built.
        if epoch < self._last_epoch and isinstance(self.scheduler, Plateau):
            raise ScheduleError(
                "as_lr_scheduler: a Plateau cannot be a part of torch's SequentialLR, because it writes learning rates "
                "whenever it observes a metric; join the schedules (opt_scheduler.join) and put the Plateau around them"
            )
        self._last_epoch = epoch

    def step(self, epoch: int | None = None) -> None:
        """Advance `scheduler` by one increment.

        Raises:
            ScheduleError: `epoch` was given, and is not the 0 with which torch before 2.9 starts a part of a
                SequentialLR. torch deprecates it; `scheduler.seek(num_steps)` does the same.
        """
        if epoch:
            raise ScheduleError(f"step: epoch={epoch!r} is not supported; use scheduler.seek(num_steps)")
        self._write(self.last_epoch + 1 if epoch is None else epoch)  # may raise: before torch counts
        super().step(epoch)

    def get_lr(self) -> list[Any]:
        """Let `scheduler` write the groups for `last_epoch`, and return the learning rates; torch writes them again."""
        self._write(self.last_epoch)
        return [group["lr"] for group in self.optimizer.param_groups]

    def _follow_bases(self) -> None:
        """Let each `initial_lr` that is the former base of its group be the present one."""
        former = self._bases
        self._bases = self.scheduler.base_lrs
        for group, before, now in zip(self.optimizer.param_groups, former, self._bases):  # groups may have been added
            if before != now and group.get("initial_lr") == before:
                group["initial_lr"] = now

    def _write(self, epoch: int) -> None:
        self._follow_bases()
        self.scheduler.seek(self.scheduler.num_steps + (epoch - self._epoch) * self.increment)
        self._epoch = epoch

    def get_last_lr(self) -> list[Any]:
        """Return the learning rate of each group as a float."""
        return self.scheduler.get_last_lr()

    def state_dict(self) -> Plain:
        """Return the state of `scheduler` and torch's counters, in plain types, which `weights_only=True` loads."""
        return {
            "scheduler": self.scheduler.state_dict(),
            "last_epoch": self.last_epoch,
            "step_count": self._step_count,
            "writes_groups": self._writes_groups(),
        }

    def _writes_groups(self) -> bool:
        """Whether the groups have the values of `scheduler`, not those of another part of a composed scheduler.

        Writes the values of `scheduler` to compare them, and puts the present ones back.
        """
        present = self._entries()
        self.scheduler.seek(self.scheduler.num_steps)
        written = self._entries()
        self._restore(present)
        return self.last_epoch >= 0 and written == present

    def load_state_dict(self, state_dict: Plain) -> None:
        """Set the state and write the groups, unless another scheduler had written them. On an error nothing has
        changed.

        Raises:
            ScheduleError: not a state of this adapter, or one that `scheduler` refuses.
        """
        check_state("as_lr_scheduler", state_dict, ("scheduler", "last_epoch", "step_count"))
        before = self._entries()
        self._bases = self.scheduler.base_lrs  # of the groups, which may have been loaded before
        self.scheduler.load_state_dict(state_dict["scheduler"])
        if not state_dict.get("writes_groups", True):  # older states lack it
            self._restore(before)
        self._last_epoch = state_dict["last_epoch"]
        self._epoch = max(self._last_epoch, 0)
        self._step_count = state_dict["step_count"]

    def _entries(self) -> list[dict[str, Any]]:
        """Copies of the entries of the groups."""
        groups = self.optimizer.param_groups
        return [{name: deepcopy(group[name]) for name in group if name != "params"} for group in groups]

    def _restore(self, entries: list[dict[str, Any]]) -> None:
        """Write the entries of `_entries` back; tensors in place."""
        for group, kept in zip(self.optimizer.param_groups, entries, strict=True):
            for name, entry in kept.items():
                if isinstance(entry, Tensor):
                    group[name].copy_(entry)
                elif group[name] != entry:
                    group[name] = entry


def as_lr_scheduler(
    optimizer: GroupScheduler | Optimizer,
    schedule: Schedules | None = None,
    *,
    relative: bool = False,
    increment: float = 1,
) -> LRScheduler:
    """Return a torch `LRScheduler`, from an optimizer and schedules or from a scheduler of this package.

    `as_lr_scheduler(optimizer, schedule)` is `as_lr_scheduler(FieldScheduler(optimizer, schedule))`, and takes the
    same schedules: one for the learning rate, or a dict by field. They are learning rates; with `relative=True` they
    multiply those of the groups, as with torch's `LambdaLR`. Each `step()` advances by `increment`, which is the global
    batch size if the schedules count samples. The result has the scheduler of this package, with `seek` and `lr_at`, as
    its attribute `scheduler`.

    >>> import torch
    >>> from opt_scheduler import linear
    >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    >>> scheduler = as_lr_scheduler(optimizer, linear(1.0, 0.0, steps=10))
    >>> optimizer.step()
    >>> scheduler.step()
    >>> scheduler.get_last_lr()
    [0.9]

    Raises:
        ScheduleError: the arguments are of other types or in another order, the scheduler's optimizer is not a torch
            optimizer, or `increment` is not positive.
    """
    if not increment > 0:
        raise ScheduleError(f"as_lr_scheduler: increment={increment!r} must be positive")
    if isinstance(optimizer, GroupScheduler) != (schedule is None):
        raise ScheduleError(
            f"as_lr_scheduler: {optimizer!r} must be an optimizer followed by a schedule, as in "
            "as_lr_scheduler(optimizer, schedule), or alone: a FieldScheduler, OptimizerParamScheduler or Plateau"
        )
    if relative and schedule is None:
        raise ScheduleError("as_lr_scheduler: relative=True: give it to FieldScheduler, which has the schedules")
    torch_optimizer = optimizer.optimizer if isinstance(optimizer, GroupScheduler) else optimizer
    if not isinstance(torch_optimizer, Optimizer):
        raise ScheduleError(
            "as_lr_scheduler: torch's LRScheduler needs a torch.optim.Optimizer, not "
            f"{type(torch_optimizer).__name__}; make one scheduler per torch optimizer, or step a FieldScheduler "
            "yourself"
        )
    if isinstance(optimizer, GroupScheduler):
        scheduler = optimizer
    else:
        scheduler = FieldScheduler(torch_optimizer, schedule, relative=relative)  # type: ignore[arg-type]
    return _Adapter(scheduler, torch_optimizer, increment=increment)
