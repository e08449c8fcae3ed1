"""The adapter: our schedulers as a true `torch.optim.lr_scheduler.LRScheduler`. The only module that needs torch.

Who steps it, and how often:

- A loop of one's own calls `step()` after `optimizer.step()`, once per update.
- Lightning does so if `configure_optimizers` says {"scheduler": ..., "interval": "step"}; once per epoch is
  its default. Without the adapter it asks for a hook, `lr_scheduler_step`, that calls `scheduler.step()`.
- The HF Trainer takes `optimizers=(optimizer, scheduler)` and steps once per update, except where one was skipped.
- Accelerate, after `prepare(scheduler)`, steps `num_processes` times per update (once with `split_batches=True`), and
  not at all where an update was skipped. Leave the scheduler out of `prepare` to step it once, or count in batches of
  one process.

torch's OneCycleLR stores `max_lr` and `min_lr` in the groups, where they would look like overrides: an
`OptimizerParamScheduler` refuses such groups, when it is built and at every step. A `FieldScheduler` never reads them.
"""

from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .errors import ScheduleError
from .group_scheduler import GroupScheduler


class _Adapter(LRScheduler):
    """Counts torch's way and lets `scheduler` write the groups: all fields it schedules, not only the learning rate."""

    def __init__(self, scheduler: GroupScheduler, optimizer: Optimizer, *, increment: float) -> None:
        self.scheduler = scheduler
        self.increment = increment
        # torch would take the present lr, often 0 in warmup, for the base that others multiply.
        for group, base_lr in zip(optimizer.param_groups, scheduler.base_lrs, strict=True):
            group["initial_lr"] = base_lr
        super().__init__(optimizer)

    def step(self, epoch: int | None = None) -> None:
        """Move `scheduler` by one increment. `epoch` is not supported: torch deprecates it, and `seek` exists.

        Raises:
            ScheduleError: an epoch was given.
        """
        if epoch is not None:
            raise ScheduleError(f"step: epoch={epoch!r} is not supported; use seek(num_steps) of the scheduler inside")
        if self._step_count > 0:  # torch's constructor calls step() once, which moves nothing
            self.scheduler.step(self.increment)
        super().step()

    def get_lr(self) -> list[Any]:
        """The learning rates as `scheduler` has written them; torch writes them once more."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_last_lr(self) -> list[Any]:
        """For each group its learning rate, as a float."""
        return list(self.scheduler.get_last_lr())

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's own state and torch's counters, in plain types: it loads with `weights_only=True`."""
        return {
            "scheduler": self.scheduler.state_dict(),
            "last_epoch": self.last_epoch,
            "step_count": self._step_count,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the state, and write the groups; on an error nothing has changed.

        Raises:
            ScheduleError: not a state of this adapter, or one that the scheduler inside refuses.
        """
        if missing := {"scheduler", "last_epoch", "step_count"} - set(state_dict):
            raise ScheduleError(f"state of the adapter: {sorted(missing)} missing; it has {sorted(state_dict)}")
        self.scheduler.load_state_dict(state_dict["scheduler"])
        self.last_epoch = state_dict["last_epoch"]
        self._step_count = state_dict["step_count"]


def as_lr_scheduler(scheduler: GroupScheduler, *, increment: float = 1) -> LRScheduler:
    """`scheduler` as a true torch `LRScheduler`, for trainers that accept nothing else.

    Each `step()` moves it by `increment`: the global batch size where steps are samples. `seek` and `lr_at` remain
    methods of `scheduler` itself.

    >>> import torch
    >>> from opt_scheduler import FieldScheduler, linear
    >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    >>> torch_scheduler = as_lr_scheduler(FieldScheduler(optimizer, {"lr": linear(1.0, 0.0, steps=10)}))
    >>> optimizer.step()
    >>> torch_scheduler.step()
    >>> torch_scheduler.get_last_lr()
    [0.9]

    Raises:
        ScheduleError: `scheduler` is a plain schedule or something else, its optimizer is not a torch optimizer, or
            `increment` is not positive.
    """
    if not isinstance(scheduler, GroupScheduler):
        raise ScheduleError(
            f"as_lr_scheduler: scheduler={scheduler!r} must be a FieldScheduler or an OptimizerParamScheduler; for a "
            "schedule, use as_lr_scheduler(FieldScheduler(optimizer, {'lr': schedule}))"
        )
    optimizer = scheduler.optimizer
    if not isinstance(optimizer, Optimizer):
        raise ScheduleError(
            f"as_lr_scheduler: torch's LRScheduler needs a torch.optim.Optimizer, but the scheduler has "
            f"{type(optimizer).__name__}; make one scheduler per torch optimizer, or step it yourself"
        )
    if not increment > 0:
        raise ScheduleError(f"as_lr_scheduler: increment={increment!r} must be positive")
    return _Adapter(scheduler, optimizer, increment=increment)
