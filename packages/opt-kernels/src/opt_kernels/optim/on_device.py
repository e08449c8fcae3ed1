"""Device-side values of an optimizer with `capturable=True`, so that the host reads no device tensor in a step.

A table on the device holds the numbers of the groups (`opt_kernels.hyper_table` lists what a captured step freezes).
Steps are counted on the device. The loss scale, the overflow flag and the gradient norm are never read on the host.
"""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opt_kernels.backends import tables
from opt_kernels.dtensor import local
from opt_kernels.hooks import HookedUpdate
from opt_kernels.hyper_table import HyperTable
from opt_kernels.params import Groups
from opt_kernels.rules.base import Rule

logger = logging.getLogger(__name__)
DEVICES = ("cuda", "meta")  # devices with graphs; a meta tensor may still move to one


class CaptureError(ValueError):
    """A replay of the captured step would not update the current parameters, gradients or groups."""


class GroupsOnDevice:
    """The numbers of the parameter groups, on every device that has parameters."""

    def __init__(self, rules: Sequence[Rule]):
        """For the numbers that these rules read."""
        self._rules = rules
        self._tables: dict[torch.device, HyperTable] = {}
        self._fresh: set[torch.device] = set()  # devices whose tables are up to date in this step
        self._captured: list[object] | None = None  # what the captured step froze
        # Whether the last `notice_stale_numbers` found numbers that were not uploaded, and none were since.
        self._was_behind = False
        self._warned = False

    def begin_step(self) -> None:
        """Mark all tables as outdated: groups may have changed since the last step."""
        self._fresh.clear()

    def of(self, device: torch.device, groups: Groups) -> list[dict[str, Any]]:
        """The groups with their numbers on `device`."""
        if device not in self._tables:
            upload = partial(tables.to_device, device=device)
            self._tables[device] = HyperTable(self._rules, device=device, upload=upload, more=["scalar_eps"])
        table = self._tables[device]
        if tables.is_capturing(device):
            self._captured = self._frozen()
        elif device not in self._fresh:
            table.refresh_(groups)
            self._fresh.add(device)
        return table.groups

    @property
    def is_capturing(self) -> bool:
        """Whether the current step is being captured."""
        return any(map(tables.is_capturing, self._tables))

    @property
    def is_captured(self) -> bool:
        """Whether a step was captured."""
        return self._captured is not None

    def upload(self, groups: Groups) -> None:
        """Write the numbers of the groups. Raises CaptureError if something that a captured step froze has changed."""
        self._was_behind = False
        for table in self._tables.values():
            table.refresh_(groups)
        if self._captured is not None and self._captured != self._frozen():
            raise CaptureError(
                "param_groups changed in something that the captured step froze: an entry that is not a number, a "
                "tensor in another place, or a number that switches a part of the formula off at 0; capture it again"
            )

    def notice_stale_numbers(self, groups: Groups) -> None:
        """Warn once if numbers that had changed at the last call are still not uploaded: the replay in between used the
        old ones."""
        if self._captured is None or self._warned:
            return
        is_behind = any(table.is_behind(groups) for table in self._tables.values())
        if is_behind and self._was_behind:
            logger.warning(
                "param_groups have other numbers than the captured step reads, and had before the last zero_grad(): "
                "replays since then used the old ones; call upload_groups() before each replay"
            )
            self._warned = True
        self._was_behind = is_behind

    def _frozen(self) -> list[object]:
        return [table.frozen for table in self._tables.values()]


def addresses(params: Sequence[Tensor]) -> list[int | None]:
    """The addresses of the gradients of parameters."""
    return [None if param.grad is None else local(param.grad).data_ptr() for param in params]


def check_capturable(param: Tensor, rule: Rule) -> None:
    """Raise ValueError if a step of `rule` on `param` cannot be captured."""
    if param.device.type not in DEVICES:
        raise ValueError(
            f"capturable=True with a parameter on {str(param.device)!r}: only cuda devices have graphs; move the model "
            "there before the optimizer is built, or leave capturable=False"
        )
    if isinstance(rule, HookedUpdate):
        raise ValueError(
            f"capturable=True with hooks {rule.hooks!r}, which allocate memory in every step; pass hooks that are "
            "part of a formula, or leave capturable=False"
        )
    if not getattr(rule, "capturable", False):
        raise ValueError(
            f"capturable=True with rule {rule.name!r}, which reads numbers on the host; leave capturable=False"
        )
    if getattr(rule, "backend", None) not in (None, "triton"):
        raise ValueError("capturable=True with a backend that reads numbers on the host; pass backend=None or 'triton'")
